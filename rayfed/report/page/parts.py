"""Parts of a page: sections with figures, tables and texts, each with the numbers behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from rayfed.columns import Kind, share_of
from rayfed.terminal.table_formats import Column, Rows, Table


def shown_as(kind: Kind, metric: str) -> Kind:
    """Kind of a column of scores: shares in percent, or plain numbers for a metric that is no share."""
    return "number" if share_of(metric) == 1 and kind in ("percent", "points") else kind


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


Part: TypeAlias = Figure | Table | Tiles | Sentences


@dataclass(frozen=True)
class Section:
    """A part of the page with its own heading.

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
