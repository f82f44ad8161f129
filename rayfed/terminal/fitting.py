"""Fits tables and sentences to the width of a terminal; what goes to a file or a pipe has no limit.

A column that does not fit follows below, in a block that begins with the first column again. Nothing is left
out, except from the lines of rounds (`rayfed.terminal.console.line`).
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from typing import TextIO

GAP = 2  # spaces between two columns
LEAST = 8  # letters of a column, below which a terminal breaks the lines
COMMAND = "python -m "
"""What marks a line with a command, which stays in one piece so that it can be copied."""


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Columns of the terminal that a stream writes to (standard output by default); None: it is none."""
    stream = stream or sys.stdout
    return shutil.get_terminal_size().columns if stream.isatty() else None


def fitted(text: str, width: int | None, hanging: int = 2) -> str:
    """Lines wrapped between words, except those with a command.

    Args:
        text: The lines.
        width: Letters of a line; None: no limit.
        hanging: Spaces by which what follows is indented more than the line.
    """
    if width is None:
        return text
    lines = []
    for line in text.split("\n"):
        if len(line) <= width or COMMAND in line:
            lines.append(line)
            continue
        indent = " " * min(len(line) - len(line.lstrip()) + hanging, width // 2)
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines)


def table_blocks(
    rows: Sequence[Sequence[str]], left: Collection[int] = (0,), width: int | None = None
) -> list[list[str]]:
    """A table as aligned lines.

    Args:
        rows: The cells, one text a column; a row of the same length each, with the head as the first.
        left: Columns that are aligned to the left.
        width: Letters of a line; None: no limit.

    Returns:
        The blocks, to be written below each other, with one text a row; wrapped cells give it several lines.
    """
    cells = [[[cell] for cell in row] for row in rows]
    if width is not None:
        first = max(LEAST, min(max(len(row[0]) for row in rows), width // 2))
        limits = [first, *[max(LEAST, width - first - GAP)] * (len(rows[0]) - 1)]
        cells = [[_wrapped(*pair) for pair in zip(row, limits, strict=True)] for row in rows]
    widths = [max(len(part) for row in cells for part in row[i]) for i in range(len(rows[0]))]
    blocks = []
    for block in _columns(widths, width):
        sizes = [widths[i] for i in block]
        at_left = [i in left for i in block]
        blocks.append([_row([row[i] for i in block], sizes, at_left) for row in cells])
    return blocks


def _wrapped(cell: str, limit: int) -> list[str]:
    """A cell in lines; one that fits keeps its spaces."""
    return [cell] if len(cell) <= limit else textwrap.wrap(cell, limit, break_on_hyphens=False) or [""]


def _columns(widths: Sequence[int], width: int | None) -> Iterator[list[int]]:
    """The columns of each block: the first one, then as many of the others, in order, as fit."""
    block = [0]
    for column in range(1, len(widths)):
        needed = sum(widths[i] + GAP for i in block) + widths[column]
        if width is not None and needed > width and len(block) > 1:
            yield block
            block = [0]
        block.append(column)
    yield block


def _row(cells: Sequence[Sequence[str]], widths: Sequence[int], left: Sequence[bool]) -> str:
    lines = []
    for number in range(max(map(len, cells))):
        parts = (cell[number] if number < len(cell) else "" for cell in cells)
        padded = (
            part.ljust(size) if at_left else part.rjust(size)
            for part, size, at_left in zip(parts, widths, left, strict=True)
        )
        lines.append((" " * GAP).join(padded).rstrip())
    return "\n".join(lines)
