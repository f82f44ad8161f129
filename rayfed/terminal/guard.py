"""How a command ends: exit codes, one line for an error, and signals."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rayfed.errors import ConfigError, RayFedError, one_line
from rayfed.terminal.console import say

STOP = threading.Event()
"""Set when the process was asked to end."""


def guarded(work: Callable[[], object], debug: bool = False) -> int:
    """Do the work of a command; its exit code, with one line on standard error where it is not 0."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # Two spinning threads on contended cores are slower than one.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        with stoppable():
            work()
    except RayFedError as err:
        if debug:
            traceback.print_exc()
        say(f"error: {one_line(err)}", sys.stderr)
        return 2 if isinstance(err, ConfigError) else 1
    except KeyboardInterrupt:
        say("interrupted; finished rounds are kept", sys.stderr)
        return 130
    return 0


@contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C end a run: everything that was started is ended.

    An exception that a signal raises inside Ray's own code may be lost there, so the request is also noted
    and looked at after every round.
    """

    def stop(*_: object) -> None:
        STOP.set()
        raise KeyboardInterrupt

    STOP.clear()
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
