"""The table of a study: a frame of pandas that also writes itself as text, Markdown, LaTeX, HTML or CSV."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import pandas as pd

from rayfed.columns import Kind, share_of
from rayfed.errors import ConfigError, unknown
from rayfed.terminal.table_formats import Column, Table

Format: TypeAlias = Literal["text", "markdown", "latex", "html", "csv"]

FORMATS = ("text", "markdown", "latex", "html", "csv")

KINDS: dict[str, Kind] = {
    "p": "p",
    "p_corrected": "p",
    "seeds": "count",
    "seeds_needed": "count",
    "verdict": "text",
    "against": "text",
    "local_steps": "count",
    "local_examples": "count",
    "local_tokens": "count",
    "flops": "number",
    "bytes": "bytes",
}
"""Kinds of columns that are no scores."""


class TableFrame(pd.DataFrame):
    """A frame with a row for each row of a study; calling it writes it: `study.table("latex")`.

    Frames that are made from it are plain ones. `attrs` has the `title`, the `metric` and the `notes`.
    """

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return pd.DataFrame

    def __call__(self, format: Format = "text") -> str:
        """The table in a form.

        Args:
            format: `text`, `markdown`, `latex` (for the package booktabs), `html` or `csv`.

        Raises:
            ConfigError: There is no such form.
        """
        if format not in FORMATS:
            raise ConfigError(unknown("study: format", str(format), FORMATS))
        write: Any = getattr(table_of(self), format)
        text: str = write()
        return text


def table_of(frame: pd.DataFrame) -> Table:
    """A frame of scores as a table; shares are shown in percent."""
    metric = str(frame.attrs.get("metric", ""))
    columns = [Column(str(frame.index.name or "row")), *(_column(str(name), metric) for name in frame)]
    rows = [[str(label), *map(_cell, values)] for label, *values in frame.itertuples()]
    return Table(frame.attrs.get("title", ""), columns, rows, tuple(frame.attrs.get("notes", ())))


def _column(name: str, metric: str) -> Column:
    if name in KINDS or name == "model":
        return Column(name, KINDS.get(name, "text"))
    if share_of(metric) == 1:
        return Column(name, "number")
    return Column(name, "points" if name in ("deviation", "difference", "low", "high") else "percent")


def _cell(value: Any) -> Any:
    return None if not isinstance(value, str) and pd.isna(value) else value
