"""Decides the exit code of a command: turns errors into one line and a code, and handles signals."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from rayfed.errors import ClientError, OutputClosedError, RayFedError, one_line, printable
from rayfed.terminal.arguments import forget_command
from rayfed.terminal.console import erase, say

CLOSED = 141  # exit code of a command that a closed pipe ends, as of other programs
STOP = threading.Event()
"""Set when SIGINT or SIGTERM was received."""


OURS = ("rayfed", "tune", "algorithms")
"""Packages whose messages are shown without the name of the package."""


class _Log(logging.StreamHandler[TextIO]):
    """Writes messages to standard error, after the text of the stage was removed from the screen."""

    def format(self, record: logging.LogRecord) -> str:
        package = record.name.partition(".")[0]
        source = "" if package in OURS else f" from {package}"
        text = "\n".join(map(printable, super().format(record).split("\n")))
        return f"{record.levelname.lower()}{source}: {text}"

    def emit(self, record: logging.LogRecord) -> None:
        erase()
        super().emit(record)


@dataclass
class Ending:
    """The end of a command.

    Attributes:
        code: Its exit code.
    """

    code: int = 0


@contextmanager
def ending(debug: bool = False, interrupted: str = "nothing was changed") -> Iterator[Ending]:
    """While the block runs, errors and signals end it with one line on standard error and an exit code.

    Args:
        debug: Also show the traceback of a RayFedError.
        interrupted: Text that is shown if Ctrl-C or SIGTERM ends the command and the exception has no notes.

    Yields:
        The end, whose exit code is set after the block: 1 for a failure, 2 for bad input, 75 if a cluster is
        busy or does not answer, 130 after an interruption, 141 if the output is not read any more. In these
        cases one line gives the reason; in the last one only if a run ended with it.
    """
    end = Ending()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_Log()])
    # Threads of OpenMP that wait in a loop slow each other down when processes share cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        with stoppable():
            yield end
    except OutputClosedError as err:
        if notes := getattr(err, "__notes__", ()):  # a run has ended with it
            say("; ".join([f"error: {one_line(err)}", *notes]), sys.stderr)
        end.code = CLOSED
    except RayFedError as err:
        trace = err.trace if isinstance(err, ClientError) else ""
        if debug:
            traceback.print_exc()
            if trace:
                say(trace, sys.stderr)
        elif trace:
            err.add_note("--debug shows the traceback")
        say("; ".join([f"error: {one_line(err)}", *getattr(err, "__notes__", ())]), sys.stderr)
        end.code = err.exit_code
    except KeyboardInterrupt as err:
        say("; ".join(["interrupted", *(getattr(err, "__notes__", ()) or [interrupted])]), sys.stderr)
        end.code = 130
    finally:
        forget_command()


def run_guarded(
    work: Callable[[], int | None], debug: bool = False, interrupted: str = "nothing was changed"
) -> int:
    """Run the work of a command in `ending`, and return its exit code.

    Args:
        work: Does the work; returns the exit code, or None for 0.
        debug: As of `ending`.
        interrupted: As of `ending`.
    """
    with ending(debug, interrupted) as end:
        end.code = work() or 0
    return end.code


class _Held:
    """Signals that wait.

    Attributes:
        blocks: Blocks of `finishing` that are being run.
        missed: A signal came in one of them.
    """

    blocks = 0
    missed = False


_HELD = _Held()


@contextmanager
def finishing() -> Iterator[None]:
    """Let a signal wait for the end of the block, where a round is recorded; a second one does not wait."""
    _HELD.blocks += 1
    missed = False
    try:
        yield
    finally:
        _HELD.blocks -= 1
        if not _HELD.blocks:
            missed, _HELD.missed = _HELD.missed, False
    if missed:
        raise KeyboardInterrupt


@contextmanager
def stoppable() -> Iterator[None]:
    """While the block runs, SIGTERM and Ctrl-C raise KeyboardInterrupt and set STOP.

    An exception that a signal raises inside Ray's own code may be lost there, so STOP is also checked after
    every round. It is cleared at the end, so that the next run of this process, as in a notebook, is not
    interrupted too.
    """

    def stop(*_: object) -> None:
        STOP.set()
        if _HELD.blocks and not _HELD.missed:
            _HELD.missed = True
            return
        raise KeyboardInterrupt

    STOP.clear()
    _HELD.missed = False
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        STOP.clear()
