"""Tables of text and the forms in which they are written: text, Markdown, HTML, LaTeX and CSV.

Text for a terminal is fitted to its width; what goes to a file or a pipe has no limit.
"""

from __future__ import annotations

import csv
import html
import io
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


GAP = 2  # spaces between two columns
LEAST = 8  # letters of a column, below which a terminal breaks the lines

MARKDOWN = {1: "**{}**", 2: "<u>{}</u>"}
HTML = {1: "<b>{}</b>", 2: "<u>{}</u>"}
LATEX = {1: "\\textbf{{{}}}", 2: "\\underline{{{}}}"}
"""Marks of the best cell (1) and the second-best one (2) in each form."""

SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
} | {sign: f"\\{sign}" for sign in "&%$#_{}"}


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        title: Its title.
        columns: Titles of the columns.
        rows: The cells, as many in each row as there are columns.
        notes: Sentences below it.
        left: Numbers of the columns that are aligned to the left; the others are aligned to the right.
        ranks: Cells that are marked, by row and column: 1 for the best, 2 for the second-best.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    left: frozenset[int] = frozenset({0})
    ranks: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def text(self, width: int | None = None) -> str:
        """The table as text.

        Args:
            width: Letters of a line; columns that do not fit follow below. None: no limit.
        """
        lines = [fitted(self.title, width)]
        for head, *body in table_blocks((self.columns, *self.rows), self.left, width):
            rule = "-" * max(len(line) for row in (head, *body) for line in row.split("\n"))
            lines += [rule, head, rule, *body, rule]
        return "\n".join([*lines, *(fitted(note, width) for note in self.notes)])

    def markdown(self, heading: str = "#", lead: str = "") -> str:
        """The table as Markdown.

        Args:
            heading: What its title begins with.
            lead: A sentence between the title and the table.
        """
        rule = ["---" if place in self.left else "---:" for place in range(len(self.columns))]
        lines = [f"{heading} {self.title}", "", *([lead, ""] if lead else [])]
        lines += [_markdown_line(self.columns), _markdown_line(rule)]
        lines += [_markdown_line(cells) for cells in self._marked(MARKDOWN, str)]
        return "\n".join([*lines, "", *(f"{note}  " for note in self.notes)]) + "\n"

    def html(self) -> str:
        """The table as an element of HTML; the notes are left out."""
        head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in self.columns)
        rows = []
        for first, *cells in self._marked(HTML, html.escape):
            begins = (
                '<td class="text">' if place in self.left else "<td>" for place in range(1, len(self.columns))
            )
            filled = "".join(f"{begin}{cell}</td>" for begin, cell in zip(begins, cells, strict=True))
            rows.append(f'<tr><th scope="row">{first}</th>{filled}</tr>')
        return (
            f'<div class="wide"><table><caption>{html.escape(self.title)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        )

    def latex(self) -> str:
        """The table as a `tabular` of LaTeX with the package booktabs; the notes are left out."""
        kinds = "".join("l" if place in self.left else "r" for place in range(len(self.columns)))
        lines = [f"% {self.title}", f"\\begin{{tabular}}{{{kinds}}}", "\\toprule"]
        lines += [" & ".join(map(latex_text, self.columns)) + " \\\\", "\\midrule"]
        lines += [" & ".join(cells) + " \\\\" for cells in self._marked(LATEX, latex_text)]
        return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])

    def csv(self) -> str:
        """The columns and the cells as CSV, without title and notes."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        return text.getvalue()

    def _marked(self, marks: Mapping[int, str], escape: Callable[[str], str]) -> Iterator[list[str]]:
        """The rows with escaped cells and the marks of a form."""
        for i, row in enumerate(self.rows):
            yield [
                marks.get(self.ranks.get((i, j), 0), "{}").format(escape(cell)) for j, cell in enumerate(row)
            ]


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def latex_text(text: str) -> str:
    r"""A text for LaTeX.

    >>> latex_text("q_1 & 5 %")
    'q\\_1 \\& 5 \\%'
    """
    return "".join(SPECIAL.get(sign, sign) for sign in text)


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
