"""Fits sentences to the width of a terminal; what goes to a file or a pipe has no limit.

Nothing is left out, except from the lines of rounds (`rayfed.terminal.console.line`).
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TextIO

COMMAND = "python -m "
"""Mark of a line with a command, which stays in one piece so that it can be copied."""


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
