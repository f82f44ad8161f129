"""What a person sees while a run goes on: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

Row = dict[str, Any]


def say(text: str, stream: TextIO | None = None) -> None:
    """Write a line where the user looks."""
    stream = stream or sys.stdout
    stream.write(text + "\n")
    stream.flush()


def line(row: Row, rounds: int) -> str:
    """One round as one line."""
    parts = [f"round {row['round']:>{len(str(rounds))}}/{rounds}"]
    if "accuracy" in row:
        parts += [
            f"accuracy {100 * row['accuracy']:5.1f}",
            f"worst {100 * row['worst_domain_accuracy']:5.1f} ({row['worst_domain']})",
            f"loss {row['loss']:.3f}",
        ]
    if "held_out_accuracy" in row:
        parts.append(f"held out {100 * row['held_out_accuracy']:5.1f}")
    if row.get("missing"):
        parts.append(f"missing {row['missing']}")
    parts += [f"up {size(row['bytes_up'])}", f"down {size(row['bytes_down'])}", f"{row['seconds']:.1f} s"]
    return "  ".join(parts)


def size(count: float) -> str:
    """Bytes in the unit that reads best.

    >>> size(999), size(1_500), size(343_000_000)
    ('999 B', '1.5 kB', '343.0 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def follow(rows: Iterable[Row], rounds: int, quiet: bool = False) -> Iterator[Row]:
    """Pass rows on and show each one."""
    if quiet:
        yield from rows
    elif sys.stdout.isatty():
        yield from _bar(rows, rounds)
    else:
        for row in rows:
            if "round" in row:
                say(line(row, rounds))
            yield row


def _bar(rows: Iterable[Row], rounds: int) -> Iterator[Row]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("starting client actors", total=rounds)
        for row in rows:
            if "round" in row:
                progress.console.print(line(row, rounds), highlight=False)
                progress.update(task, completed=row["round"], description=f"round {row['round']}/{rounds}")
            yield row
