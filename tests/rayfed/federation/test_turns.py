"""Turns of clients: what their code does while it is ended."""

import random
import threading
import weakref

import numpy as np
import pytest
import torch

from rayfed.federation.turns import Cancelled, Streams, Turn
from rayfed.seeds import seeded

STREAMS = Streams(0)


def draws():
    """Numbers from all global streams; Python and torch hold something back for their next normal number."""
    numpy = np.random.random(3).tolist(), np.random.randint(9, size=3).tolist()
    return random.random(), random.gauss(0, 1), numpy, torch.randn(3).tolist(), torch.rand(3).tolist()


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 5, 2**63 - 1])
def test_the_streams_of_a_client_are_those_of_a_client_that_is_played_alone(seed):
    with seeded(seed) as own:
        alone = draws(), torch.rand(3, generator=own).tolist(), draws()
    with seeded(1):
        before = draws()
    with seeded(1):
        streams = Streams(seed)
        streams.swap()
        first = draws(), torch.rand(3, generator=streams.own).tolist()
        streams.swap()
        assert draws() == before  # those of the process are as they were
        streams.swap()
        assert (*first, draws()) == alone
        streams.swap()


def test_code_that_asks_again_while_it_is_ended_ends():
    def work():
        try:
            turn.ask("a pass")
        finally:
            turn.ask("another one")

    turn = Turn(work, Streams(0))
    turn.resume()
    assert turn.request == "a pass"
    ends = threading.Thread(target=turn.cancel, daemon=True)
    ends.start()
    ends.join(5)
    assert not ends.is_alive()
    assert isinstance(turn.error, Cancelled)


def test_the_code_of_a_client_is_freed_when_its_turn_has_ended():
    class Work:
        def __call__(self):
            return 5

    work = Work()
    gone = weakref.ref(work)
    turn = Turn(work, STREAMS)
    del work
    turn.resume()
    turn.cancel()
    assert turn.result == 5
    assert gone() is None


def test_code_that_never_began_ends_too():
    began = []
    turn = Turn(lambda: began.append(1), STREAMS)
    turn.cancel()
    assert not began
    assert turn.request is None
