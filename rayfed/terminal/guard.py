"""How every command ends: exit codes, one line for an error, and signals."""

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
from rayfed.terminal.arguments import Arguments
from rayfed.terminal.console import say

STOP = threading.Event()
"""Set when the process was asked to end."""


def parser_of(command: str, usage: str) -> Arguments:
    """A parser with the options that every command has.

    Args:
        command: Module of the command, such as `rayfed.run`.
        usage: What `--help` begins with: the forms of the command, what it does and an example.
    """
    parser = Arguments(command, usage=usage)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def guarded(
    work: Callable[[], int | None], debug: bool = False, interrupted: str = "nothing was changed"
) -> int:
    """Do the work of a command.

    Args:
        work: Returns the exit code; None: 0.
        debug: Show the traceback of an error that is raised on purpose.
        interrupted: What is left behind if Ctrl-C or SIGTERM ends the command.

    Returns:
        The exit code: what `work` returns, 1 for a failure, 2 for bad input, 130 if it was interrupted.
        Except for what `work` returns, one line on standard error says why it is not 0.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # Two spinning threads on contended cores are slower than one.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        with stoppable():
            return work() or 0
    except RayFedError as err:
        if debug:
            traceback.print_exc()
        say("; ".join([f"error: {one_line(err)}", *getattr(err, "__notes__", ())]), sys.stderr)
        return 2 if isinstance(err, ConfigError) else 1
    except KeyboardInterrupt as err:
        say("; ".join([f"interrupted; {interrupted}", *getattr(err, "__notes__", ())]), sys.stderr)
        return 130


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
