"""Says on the screen what a command is doing: one line that changes on a terminal, plain lines elsewhere.

A command chooses the screen with `shown_on`; without one, as in calls from Python, nothing is shown.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from rayfed.errors import OutputClosedError

EVERY = 3.0  # seconds between two lines of a count, where lines stay on the screen
BLINK = 0.1  # the same, where one line changes
FEW = 10  # things of which each one is counted at once
CLEAR = "\r\x1b[2K"
"""Moves a terminal to the beginning of its line, and clears the line."""


@dataclass
class Screen:
    """Output for texts about the work.

    Attributes:
        show: Shows a text.
        live: Whether a text replaces the one before it.
        erase: Removes the text that is shown last, if texts replace each other.
        last: The text of the last stage.
    """

    show: Callable[[str], None] = lambda _: None
    live: bool = False
    erase: Callable[[], None] = lambda: None
    last: str = ""


_screen = Screen()


@contextmanager
def shown_on(screen: Screen) -> Iterator[None]:
    """Show what is done in the block on this screen."""
    global _screen
    before = _screen
    _screen = screen
    try:
        yield
    finally:
        screen.erase()
        if _screen is screen:
            _screen = before


def screen_of(quiet: bool = False, as_json: bool = False) -> Screen:
    """The screen of a command: standard output, or standard error if JSON is written to standard output."""
    if quiet:
        return Screen()
    stream = sys.stderr if as_json else sys.stdout
    if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return _live(stream)
    return Screen(lambda text: write(text + "\n", stream))


def _live(stream: TextIO) -> Screen:
    shown = False

    def show(text: str) -> None:
        nonlocal shown
        shown = True
        write(CLEAR + text[: shutil.get_terminal_size().columns - 1], stream)

    def erase() -> None:
        nonlocal shown
        if shown:
            write(CLEAR, stream)
        shown = False

    return Screen(show, live=True, erase=erase)


def stage(text: str, passing: bool = False) -> None:
    """Say what begins now, such as "starting Ray"; a text is not repeated.

    Args:
        text: What begins.
        passing: Show it only where a later text replaces it.
    """
    if text != _screen.last and (_screen.live or not passing):
        _screen.last = text
        _screen.show(text)


@contextmanager
def counted(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Count up to `total` while the block runs; where lines stay, many things are counted every few seconds.

    Args:
        what: What is counted, such as "clients trained".
        total: How many there are.

    Yields:
        A function that is called when one more is done.
    """
    done = 0
    shown = time.monotonic()

    def advance() -> None:
        nonlocal done, shown
        done += 1
        now = time.monotonic()
        wait = BLINK if _screen.live else EVERY
        if done == total or total <= FEW or now - shown > wait:
            shown = now
            _screen.show(f"{what}: {done:,} of {total:,}")

    yield advance


def erase() -> None:
    """Remove the text of the stage from the screen, before anything else is written."""
    _screen.erase()


def write(text: str, stream: TextIO) -> None:
    """Write to a stream at once; characters that its encoding lacks are escaped.

    Raises:
        OutputClosedError: The program that read the stream has ended; later output is dropped.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError as err:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        raise OutputClosedError("the output is no longer read") from err
