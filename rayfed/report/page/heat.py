"""Heat maps as figures of the page. The numbers behind them go with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from rayfed.report.page import svg
from rayfed.report.page.parts import Cell, Column, Figure
from rayfed.report.page.svg import LEFT, RIGHT, TOP, WIDTH, Floats
from rayfed.report.style import PALETTE

Colours: TypeAlias = Literal["range", "zero", "groups"]


@dataclass(frozen=True, kw_only=True)
class Cells:
    """The numbers of a heat map.

    Attributes:
        values: Numbers of shape (rows, columns); NaN: an empty cell.
        down: Names of the rows, from the top.
        across: Names of the columns.
        row, column: What the rows and the columns are.
        value: What the numbers are.
        colours: `range`: the darkest colour is the lowest number; `zero`: it is 0; `groups`: the numbers are
            names of groups, each with a colour of its own.
    """

    values: Floats
    down: Sequence[str]
    across: Sequence[str]
    row: str
    column: str
    value: Column
    colours: Colours = "range"


def heat_map(title: str, cells: Cells, caption: str = "") -> Figure:
    """A heat map.

    Args:
        title: What is shown.
        cells: Its numbers.
        caption: How to read it.
    """
    groups = cells.colours == "groups"
    count = len(cells.down)
    each = min(22.0, max(3.0, 520.0 / max(count, 1)))
    longest = max((len(name) for name in cells.down), default=0)
    left = min(215.0, 22 + 6.6 * longest) if each >= 11 else LEFT
    box = (left, float(TOP), WIDTH - RIGHT - left, each * count)
    finite = cells.values[np.isfinite(cells.values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    dark = min(low, 0.0) if cells.colours == "zero" else low
    pixels = _grouped(cells.values) if groups else svg.shaded(cells.values, dark, high)
    drawn = [svg.image(pixels, box), *_names(cells, box, each)]
    foot = TOP + box[3] + 42
    drawn += [] if groups else _colour_bar(cells.value, dark, high, foot)
    summary = f"{title}. {count} rows ({cells.row}), {len(cells.across)} columns ({cells.column}); "
    summary += f"{cells.value.name} from {cells.value.show(low)} to {cells.value.show(high)}."
    rows = [[name, *_plain(values)] for name, values in zip(cells.down, cells.values, strict=True)]
    return Figure(
        title=title,
        caption=caption,
        svg=svg.whole(drawn, summary, foot + (4 if groups else 34)),
        summary=summary,
        columns=[Column(cells.row), *(Column(name, cells.value.kind) for name in cells.across)],
        rows=rows,
        hover="cells",
        places={"box": box, "column": cells.column, "value": cells.value.name},
    )


def _plain(values: Floats) -> list[Cell]:
    return [float(v) if math.isfinite(v) else None for v in values]


def _grouped(values: Floats) -> Any:
    """Colours of the palette for numbers of groups; transparent where there is none."""
    palette = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in PALETTE], dtype=np.uint8)
    known = np.isfinite(values)
    found = palette[np.where(known, values, 0).astype(int) % len(PALETTE)]
    return np.dstack([found, np.where(known, 255, 0).astype(np.uint8)])


def _names(cells: Cells, box: tuple[float, float, float, float], each: float) -> list[str]:
    """Names of rows and columns, as many as there is room for."""
    left, top, width, height = box
    drawn = []
    if each >= 11:
        for number, name in enumerate(cells.down):
            shown = name if len(name) <= 30 else f"{name[:29]}…"
            drawn.append(svg.text(left - 5, top + each * (number + 0.5) + 4, shown, "end", size=12))
    else:
        step = max(1, round(len(cells.down) / 8))
        drawn += [
            svg.text(left - 5, top + each * (number + 0.5) + 4, str(number + 1), "end", size=12)
            for number in range(0, len(cells.down), step)
        ]
        drawn.append(svg.text(13, top + height / 2, cells.row, turned=True))
    longest = max((len(name) for name in cells.across), default=1)
    room = max(1, int(width / (9.0 + 7.0 * longest)))
    step = max(1, math.ceil(len(cells.across) / room))
    for number in range(0, len(cells.across), step):
        at = left + width * (number + 0.5) / len(cells.across)
        drawn.append(svg.text(at, top + height + 15, cells.across[number], size=12))
    return [*drawn, svg.text(left + width / 2, top + height + 32, cells.column)]


def _colour_bar(column: Column, low: float, high: float, foot: float) -> list[str]:
    shades = svg.shaded(np.linspace(0, 1, 64)[None], 0, 1)
    start, width = WIDTH / 2 - 110, 120
    return [
        svg.image(shades, (start, foot + 4, width, 10)),
        svg.text(start - 6, foot + 14, column.show(low), "end", size=12),
        svg.text(start + width + 6, foot + 14, f"{column.show(high)}  {column.heading}", "start", size=12),
    ]
