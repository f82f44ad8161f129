"""Shows on the screen what a command is doing, and the rounds of a run.

The work is one line that changes on a terminal, and plain lines elsewhere. A command chooses the screen with
`use_screen`; without one, as in calls from Python, nothing is shown. Rounds are shown below a progress bar on
a terminal, as lines of text elsewhere, and as JSON for programs.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rayfed.columns import HELD_OUT, UNSEEN, WORST_DOMAIN, WORST_NAME, metric_of, share_of
from rayfed.errors import OutputClosedError

if TYPE_CHECKING:
    from rayfed.types import Row

log = logging.getLogger(__name__)

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
def use_screen(screen: Screen) -> Iterator[None]:
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
def count_up(what: str, total: int) -> Iterator[Callable[[], None]]:
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


SLOWEST, SLOWEST_SECONDS = "slowest_client", "slowest_seconds"
"""Keys of a row that are shown but not recorded: the client that worked longest, and its seconds."""

NONFINITE = "nonfinite_values"
"""Key of a row that is shown but not recorded: a sentence about values that are NaN or infinite."""

ADVICE = "a smaller train.lr or train.clip_norm=1 may help; on_nonfinite=raise ends a run here"


def say(text: str, stream: TextIO | None = None) -> None:
    """Write a line to a stream (standard output by default); escape characters that its encoding lacks."""
    erase()
    write(text + "\n", stream or sys.stdout)


def teller(quiet: bool = False, as_json: bool = False) -> Callable[[str], None]:
    """A function that shows a text: on standard output, or on standard error if JSON is written there."""
    return (lambda _: None) if quiet else partial(say, stream=sys.stderr if as_json else None)


def line(row: Row, rounds: int, width: int | None = None) -> str:
    """The row of a round as one line of text.

    Args:
        rounds: Number of planned rounds.
        width: Letters of a line; what does not fit is left out, from the right. None: no limit.
    """
    parts = [f"round {row['round']:>{len(str(rounds))}}/{rounds}"]
    if metric := metric_of(row):
        parts += [
            f"{metric} {_score(metric, row[metric])}",
            f"worst {_score(metric, row[WORST_DOMAIN.name(metric)])} ({row[WORST_NAME.pattern]})",
            "loss not finite" if row["loss"] is None else f"loss {row['loss']:.3f}",
        ]
    for of, words in ((HELD_OUT, "held out"), (UNSEEN, "unseen clients")):
        if other := metric_of(row, of):
            parts.append(f"{words} {_score(other, row[of + other])}")
    if row.get("missing"):
        parts.append(f"missing {row['missing']}")
    parts += [f"up {size(row['bytes_up'])}", f"down {size(row['bytes_down'])}", f"{row['seconds']:.1f} s"]
    if SLOWEST in row:
        parts.append(f"slowest {row[SLOWEST]} {row[SLOWEST_SECONDS]:.1f} s")
    while width is not None and len(parts) > 1 and len("  ".join(parts)) > width:
        parts.pop()
    return "  ".join(parts)


def _score(metric: str, value: float) -> str:
    """A score as text: a share in percent, any other with four digits."""
    return f"{100 * value:5.1f}" if share_of(metric) != 1 else f"{value:5.4g}"


def size(count: float) -> str:
    """A number of bytes with a suitable unit.

    >>> size(999), size(1_500), size(343_000_000)
    ('999 B', '1.5 kB', '343.0 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


@contextmanager
def showing(rounds: int, quiet: bool = False, json_of: Path | None = None) -> Iterator[Callable[[Row], None]]:
    """While the block runs, show rows of a run, on a terminal below a progress bar.

    Args:
        rounds: Number of planned rounds.
        quiet: Show no text.
        json_of: Folder of the run; every row is written to standard output as a JSON object, with this folder
            under the key `run`. None: no JSON.

    Yields:
        A function that shows a row: of a round, or the last one with the digest. It logs a warning if values
        of the round are not finite.
    """
    tell = teller(quiet, json_of is not None)

    def show(row: Row) -> None:
        _warn(row)
        if json_of is not None:
            say(json.dumps({"run": str(json_of), **row}, allow_nan=False))
        if "round" in row:
            tell(line(row, rounds))

    if quiet or json_of is not None or not sys.stdout.isatty():
        yield show
    else:
        with _bar(rounds) as show_above:
            yield show_above


def _warn(row: Row) -> None:
    """Log a warning if values of the round are not finite."""
    if NONFINITE in row:
        log.warning("round %d: %s; %s", row["round"], row[NONFINITE], ADVICE)


@contextmanager
def _bar(rounds: int) -> Iterator[Callable[[Row], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    erase()
    # A new console, because rich's shared one keeps the width that the terminal had at its first use.
    with Progress(*columns, console=Console(), transient=True) as progress:
        task = progress.add_task("starting", total=rounds)

        def show(row: Row) -> None:
            _warn(row)
            if "round" in row:
                progress.console.print(line(row, rounds, progress.console.width), highlight=False)
                progress.update(task, completed=row["round"], description=headline(row, rounds))

        with use_screen(Screen(lambda text: progress.update(task, description=text), live=True)):
            yield show


def headline(row: Row, rounds: int) -> str:
    """Text of the progress bar: round, metric, worst domain, slowest client, bytes sent."""
    parts = [f"round {row['round']}/{rounds}"]
    if metric := metric_of(row):
        parts.append(f"{metric} {_score(metric, row[metric]).strip()}, {row[WORST_NAME.pattern]} worst")
    if SLOWEST in row:
        parts.append(f"{row[SLOWEST]} slowest")
    return "  ".join([*parts, size(row["bytes_up"] + row["bytes_down"])])
