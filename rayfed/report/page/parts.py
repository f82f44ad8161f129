"""Parts of a page: sections with figures, tables and texts, each with the numbers behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from rayfed.objective import share_of

Kind: TypeAlias = Literal["text", "percent", "points", "bytes", "seconds", "count", "number", "p"]
"""Content of a column. `percent`: fractions, shown in percent; `points`: differences and deviations of
fractions, shown in percentage points; `p`: probabilities of a test."""

Cell: TypeAlias = str | float | int | None
Rows: TypeAlias = Sequence[Sequence[Cell]]

NOTHING = "\N{EN DASH}"
"""Stands for a value that there is not."""

UNITS: tuple[tuple[float, str], ...] = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
"""Decimal units of bytes, the largest first."""


def shown_as(kind: Kind, metric: str) -> Kind:
    """Kind of a column of scores: shares in percent, or plain numbers for a metric that is no share."""
    return "number" if share_of(metric) == 1 and kind in ("percent", "points") else kind


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


def in_time(seconds: float) -> str:
    """A number of seconds in the units of a clock.

    >>> in_time(9), in_time(75), in_time(3_700)
    ('9 s', '1 min 15 s', '1 h 1 min')
    """
    hours, rest = divmod(round(seconds), 3600)
    if hours:
        return f"{hours} h {rest // 60} min"
    return f"{rest // 60} min {rest % 60} s" if rest >= 60 else f"{rest} s"


@dataclass(frozen=True)
class Entry:
    """An entry of a legend.

    Attributes:
        label: Its words.
        colour: A colour of CSS.
        dash: Pattern of the line, as of stroke-dasharray; empty: a whole line.
        marker: Path of the marker around (0, 0), as of the attribute `d`; empty: none.
    """

    label: str
    colour: str
    dash: str = ""
    marker: str = ""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A picture with the numbers that it shows.

    Attributes:
        title: What is shown.
        caption: How to read it, in a sentence.
        svg: The picture, a whole `<svg>` or `<img>` element.
        summary: The picture in a sentence, for readers who cannot see it.
        columns: Columns of the numbers.
        rows: All numbers of the picture.
        legend: Entries of the legend; those of a line chart can be switched off.
        hover: How the picture tells what is under the pointer: `lines` finds the row by the first column,
            `cells` finds row and column; empty: it has nothing to tell.
        places: Numbers that place columns and rows in the picture, by name.
    """

    title: str
    caption: str = ""
    svg: str
    summary: str
    columns: Sequence[Column]
    rows: Rows
    legend: Sequence[Entry] = ()
    hover: Literal["lines", "cells", ""] = ""
    places: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table that can be sorted by each column.

    Attributes:
        title: What the rows are.
        caption: How to read it, in a sentence.
        columns: Its columns.
        rows: Its rows.
        filters: Names of the columns that have a list to choose from, with the value chosen at first.
        marked: Numbers of the rows that are highlighted.
        folded: It is shown only when asked for.
    """

    title: str
    caption: str = ""
    columns: Sequence[Column]
    rows: Rows
    filters: Mapping[str, str] = field(default_factory=dict)
    marked: frozenset[int] = frozenset()
    folded: bool = False


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """A few numbers that matter most: pairs of what it is and its value as text."""

    title: str
    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Sentences:
    """Sentences, and lines to copy.

    Attributes:
        title: A heading; empty: none.
        sentences: One paragraph each.
        code: Commands, one a line.
    """

    title: str = ""
    sentences: Sequence[str] = ()
    code: Sequence[str] = ()


Part: TypeAlias = Figure | Grid | Tiles | Sentences


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading of its own.

    Attributes:
        name: The heading.
        parts: What it shows.
    """

    name: str
    parts: Sequence[Part]


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """All sections about one run, shown only when asked for."""

    name: str
    sections: Sequence[Section]


@dataclass(frozen=True, kw_only=True)
class Page:
    """The whole page.

    Attributes:
        title: Its title.
        subtitle: What it is about, in a line.
        sections: What it shows.
        chapters: Runs in detail.
        facts: Configs, versions and commands of the runs, for the file with the numbers.
    """

    title: str
    subtitle: str
    sections: Sequence[Section]
    chapters: Sequence[Chapter] = ()
    facts: Sequence[Mapping[str, Any]] = ()
