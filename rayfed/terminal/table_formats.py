"""Tables of text and the forms in which they are written: text, Markdown, HTML, LaTeX and CSV.

Text for a terminal is fitted to its width; what goes to a file or a pipe has no limit.
"""

from __future__ import annotations

import csv
import html
import io
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO, TypeAlias

from rayfed.columns import Kind

COMMAND = "python -m "
"""Mark of a line with a command, which stays in one piece so that it can be copied."""


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Columns of the terminal that a stream writes to (standard output by default); None: it is none."""
    stream = stream or sys.stdout
    return shutil.get_terminal_size().columns if stream.isatty() else None


def fit_width(text: str, width: int | None, hanging: int = 2) -> str:
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


Cell: TypeAlias = str | float | int | None
Rows: TypeAlias = Sequence[Sequence[Cell]]

NOTHING = "\N{EN DASH}"
"""Stands for a value that there is not."""

UNITS: tuple[tuple[float, str], ...] = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
"""Decimal units of bytes, the largest first."""


@dataclass(frozen=True)
class Column:
    """A column of numbers or words.

    Attributes:
        name: What it holds, in words.
        kind: What its cells are.
        short: Its heading where the name would be too long; empty: the name with its unit.
    """

    name: str
    kind: Kind = "text"
    short: str = ""

    def show(self, value: Cell) -> str:
        """A cell as text; a dash where there is no value.

        >>> Column("score", "percent").show(0.1234), Column("up", "bytes").show(1_500_000)
        ('12.3', '1.5 MB')
        """
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return NOTHING
        if isinstance(value, str):
            return value
        if self.kind in ("percent", "points"):
            return f"{100 * value:.1f}"
        if self.kind == "bytes":
            return in_bytes(value)
        if self.kind == "seconds":
            return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
        if self.kind == "p":
            return "< 0.001" if value < 0.001 else f"{value:.3f}"
        return f"{value:,.0f}" if self.kind == "count" else f"{value:.4g}"

    @property
    def heading(self) -> str:
        """The name with the unit of what is shown."""
        if self.short:
            return self.short
        unit = {"percent": "%", "points": "points", "seconds": "s"}.get(self.kind, "")
        return f"{self.name}, {unit}" if unit else self.name


def in_bytes(count: float) -> str:
    """A number of bytes with its unit.

    >>> in_bytes(512), in_bytes(2_340_000_000)
    ('512 B', '2.3 GB')
    """
    for size, unit in UNITS:
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


@dataclass(frozen=True)
class Table:
    """A table of words and numbers.

    Attributes:
        title: Its title.
        columns: Its columns; those of words alone may be given by their titles.
        rows: The cells, as many in each row as there are columns.
        notes: Sentences below it.
        left: Numbers of the columns that are aligned to the left; None: the first one, and all words where
            columns are given as such.
        ranks: Cells that are marked, by row and column: 1 for the best, 2 for the second-best.
        filters: Names of the columns that have a list to choose from on a page, with the value chosen first.
        marked: Numbers of the rows that are highlighted on a page.
        folded: It is shown on a page only when asked for.
    """

    title: str
    columns: Sequence[str | Column]
    rows: Rows
    notes: Sequence[str] = ()
    left: frozenset[int] | None = None
    ranks: Mapping[tuple[int, int], int] = field(default_factory=dict)
    filters: Mapping[str, str] = field(default_factory=dict)
    marked: frozenset[int] = frozenset()
    folded: bool = False

    @property
    def heads(self) -> tuple[Column, ...]:
        """Its columns."""
        return tuple(Column(one) if isinstance(one, str) else one for one in self.columns)

    @property
    def caption(self) -> str:
        """The notes as one text."""
        return " ".join(self.notes)

    @property
    def texts(self) -> list[list[str]]:
        """The titles of the columns, then the cells of each row."""
        heads = self.heads
        shown = ([head.show(cell) for head, cell in zip(heads, row, strict=True)] for row in self.rows)
        return [[head.heading for head in heads], *shown]

    @property
    def at_left(self) -> frozenset[int]:
        """Numbers of the columns that are aligned to the left."""
        if self.left is not None:
            return self.left
        words = (i for i, one in enumerate(self.columns) if isinstance(one, Column) and one.kind == "text")
        return frozenset({0, *words})

    def text(self, width: int | None = None) -> str:
        """The table as text.

        Args:
            width: Letters of a line; columns that do not fit follow below. None: no limit.
        """
        lines = [fit_width(self.title, width)]
        for head, *body in table_blocks(self.texts, self.at_left, width):
            rule = "-" * max(len(line) for row in (head, *body) for line in row.split("\n"))
            lines += [rule, head, rule, *body, rule]
        return "\n".join([*lines, *(fit_width(note, width) for note in self.notes)])

    def markdown(self, heading: str = "#", lead: str = "") -> str:
        """The table as Markdown.

        Args:
            heading: What its title begins with.
            lead: A sentence between the title and the table.
        """
        rule = ["---" if place in self.at_left else "---:" for place in range(len(self.columns))]
        lines = [f"{heading} {self.title}", "", *([lead, ""] if lead else [])]
        lines += [_markdown_line(self.texts[0]), _markdown_line(rule)]
        lines += [_markdown_line(cells) for cells in self._mark(MARKDOWN, str)]
        return "\n".join([*lines, "", *(f"{note}  " for note in self.notes)]) + "\n"

    def html(self, sorts: bool = False) -> str:
        """The table as an element of HTML; the notes are left out.

        Args:
            sorts: It has what the script of a page needs to sort and to filter it.
        """
        heads = "".join(_html_head(head, sorts) for head in self.heads)
        rows = []
        for i, texts in enumerate(self._mark(HTML, html.escape)):
            cells = zip(self.heads, texts, self.rows[i], strict=True)
            filled = "".join(self._html_cell(j, *cell, sorts) for j, cell in enumerate(cells))
            rows.append(f'<tr class="marked">{filled}</tr>' if i in self.marked else f"<tr>{filled}</tr>")
        begin = '<table class="sorts"><caption class="unseen">' if sorts else "<table><caption>"
        body = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>"
        return f'<div class="wide">{begin}{html.escape(self.title)}</caption>{body}</table></div>'

    def _html_cell(self, place: int, head: Column, text: str, value: Cell, sorts: bool) -> str:
        """A cell with escaped text; `place` is the number of its column."""
        kind = "text" if place and place in self.at_left and not sorts else ""
        if sorts and place and head.kind != "text":
            kind = "number"
        elif sorts and isinstance(value, str) and len(value) > LONG:
            kind = "long"
        about = f' class="{kind}"' if kind else ""
        about += f' data-value="{html.escape(sort_key(value))}"' if sorts else ""
        return f"<td{about}>{text}</td>" if place else f'<th scope="row"{about}>{text}</th>'

    def latex(self) -> str:
        """The table as a `tabular` of LaTeX with the package booktabs; the notes are left out."""
        kinds = "".join("l" if place in self.at_left else "r" for place in range(len(self.columns)))
        lines = [f"% {self.title}", f"\\begin{{tabular}}{{{kinds}}}", "\\toprule"]
        lines += [" & ".join(map(latex_text, self.texts[0])) + " \\\\", "\\midrule"]
        lines += [" & ".join(cells) + " \\\\" for cells in self._mark(LATEX, latex_text)]
        return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])

    def csv(self) -> str:
        """The columns and the cells as CSV, without title and notes."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self.texts)
        return text.getvalue()

    def _mark(self, marks: Mapping[int, str], escape: Callable[[str], str]) -> Iterator[list[str]]:
        """The rows with escaped cells and the marks of a form."""
        for i, row in enumerate(self.texts[1:]):
            yield [
                marks.get(self.ranks.get((i, j), 0), "{}").format(escape(cell)) for j, cell in enumerate(row)
            ]


def _html_head(head: Column, sorts: bool) -> str:
    """The head of a column, with a button if the table is sorted by it."""
    heading = html.escape(head.heading)
    if not sorts:
        return f'<th scope="col">{heading}</th>'
    name = html.escape(head.name)
    about = "" if head.kind == "text" else ' class="number"'
    about += f' data-name="{name}"' + (f' title="{name}"' if head.short else "")
    return f'<th scope="col"{about}><button type="button">{heading}</button></th>'


LONG = 36
"""Letters from which on a cell of words is broken into lines on a page."""


def sort_key(value: Cell) -> str:
    """Sort key of a cell, as text; empty cells come last."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return f"{value:.10g}" if isinstance(value, int | float) else value


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
        cells = [[_wrap(*pair) for pair in zip(row, limits, strict=True)] for row in rows]
    widths = [max(len(part) for row in cells for part in row[i]) for i in range(len(rows[0]))]
    blocks = []
    for block in _columns(widths, width):
        sizes = [widths[i] for i in block]
        at_left = [i in left for i in block]
        blocks.append([_row([row[i] for i in block], sizes, at_left) for row in cells])
    return blocks


def _wrap(cell: str, limit: int) -> list[str]:
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
