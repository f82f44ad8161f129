"""Turns of clients: what their code does while it is ended."""

import gc
import random
import threading
import weakref

import numpy as np
import pytest
import torch

from rayfed.fast.group import Cancelled, Streams, Turn, restore_streams, take_turns
from rayfed.seeds import use_seed

STREAMS = Streams(0)


def draws():
    """Numbers from all global streams; Python and torch hold something back for their next normal number."""
    numpy = np.random.random(3).tolist(), np.random.randint(9, size=3).tolist()
    return random.random(), random.gauss(0, 1), numpy, torch.randn(3).tolist(), torch.rand(3).tolist()


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 5, 2**63 - 1])
def test_the_streams_of_a_client_are_those_of_a_client_that_is_played_alone(seed):
    with use_seed(seed) as own:
        alone = draws(), torch.rand(3, generator=own).tolist(), draws()
    with use_seed(1):
        before = draws()
    with use_seed(1):
        streams = Streams(seed)
        with restore_streams():
            streams.begin()
            first = draws(), torch.rand(3, generator=streams.own).tolist()
            streams.end()
        assert draws() == before  # those of the process are as they were
        with restore_streams():
            streams.begin()
            assert (*first, draws()) == alone


def test_code_that_asks_again_while_it_is_ended_ends():
    def work():
        try:
            turn.ask("a pass")
        finally:
            turn.ask("another one")

    turn = Turn(work, Streams(0))
    take_turns([turn], [None])
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
    take_turns([turn], [None])
    turn.cancel()
    assert turn.result == 5
    assert gone() is None


def test_code_that_never_began_ends_too():
    began = []
    turn = Turn(lambda: began.append(1), STREAMS)
    turn.cancel()
    assert not began
    assert turn.request is None


def test_clients_run_in_order_with_their_own_streams_and_answers():
    seen = []

    def work(k):
        def run():
            seen.append((k, "begins", random.random()))
            seen.append((k, turns[k].ask(f"pass {k}"), random.random()))
            return k

        return run

    turns = [Turn(work(k), Streams(k)) for k in range(3)]
    with use_seed(9):
        take_turns(turns, [None] * 3)
        assert [turn.request for turn in turns] == ["pass 0", "pass 1", "pass 2"]
        take_turns([turns[0], turns[2]], ["a", "c"])
        assert [turn.request for turn in turns] == [None, "pass 1", None]
        take_turns([turns[1]], ["b"])
        after = random.random()
    with use_seed(9):
        assert random.random() == after
    numbers = []
    for k in range(3):
        with use_seed(k):
            numbers.append((random.random(), random.random()))
    first = [(k, "begins", numbers[k][0]) for k in range(3)]
    assert seen == [*first, *((k, "abc"[k], numbers[k][1]) for k in (0, 2, 1))]
    assert [turn.result for turn in turns] == [0, 1, 2]
    for turn in turns:
        turn.cancel()


def test_clients_after_one_that_failed_do_not_run():
    began = []

    def work(k):
        def run():
            began.append(k)
            if k == 1:
                raise ValueError("broken")

        return run

    turns = [Turn(work(k), Streams(k)) for k in range(3)]
    take_turns(turns, [None] * 3)
    assert began == [0, 1]
    assert [type(turn.error) for turn in turns] == [type(None), ValueError, type(None)]
    for turn in turns:
        turn.cancel()
    assert began == [0, 1]


def test_answers_are_freed_when_the_clients_have_ended():
    class Answer:
        pass

    turns = [Turn(lambda: turns[0].ask("a pass") and None, Streams(0))]
    take_turns(turns, [None])
    answer = Answer()
    gone = weakref.ref(answer)
    gc.disable()
    try:
        take_turns(turns, [answer])
        turns.pop().cancel()
        del answer
        assert gone() is None
    finally:
        gc.enable()
