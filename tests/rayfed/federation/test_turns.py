"""Turns of clients: what their code does while it is ended."""

import threading

from rayfed.federation.turns import Cancelled, Streams, Turn


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
