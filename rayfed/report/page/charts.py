"""Charts of curves and heat maps as figures of the page, in SVG. The numbers behind them go with them."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from rayfed.objective import share_of
from rayfed.report.page.parts import UNITS, Cell, Column, Entry, Figure, Kind
from rayfed.report.style import LINES, PALETTE, Look, looks

WIDTH = 480
"""Width of a picture. A phone shows it at three quarters of that in pixels, where its texts are legible."""
HEIGHT = 280
FONT = 13
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 44
"""Room around the axes."""
DASHES = dict(zip(LINES, ("", "7 4", "2 3", "8 3 2 3"), strict=True))
"""Patterns of lines of SVG, by the names that matplotlib gives them."""
PATHS = {
    "o": "M-3.5,0a3.5,3.5 0 1,0 7,0a3.5,3.5 0 1,0 -7,0z",
    "s": "M-3,-3h6v6h-6z",
    "^": "M0,-4l4,7h-8z",
    "D": "M0,-4.2l4.2,4.2l-4.2,4.2l-4.2,-4.2z",
    "v": "M0,4l4,-7h-8z",
    "P": "M-1.3,-4h2.6v2.7h2.7v2.6h-2.7v2.7h-2.6v-2.7h-2.7v-2.6h2.7z",
    "X": "M-4,-2.6l1.4,-1.4l2.6,2.6l2.6,-2.6l1.4,1.4l-2.6,2.6l2.6,2.6l-1.4,1.4l-2.6,-2.6l-2.6,2.6"
    "l-1.4,-1.4l2.6,-2.6z",
    "<": "M-4,0l7,-4v8z",
    ">": "M4,0l-7,-4v8z",
    "p": "M0,-4l3.8,2.8l-1.5,4.4h-4.6l-1.5,-4.4z",
}
"""Markers around (0, 0), by the names that matplotlib gives them."""
COLOURS = 10
"""Number of colours `--c0`, `--c1`, ... of the page, which are those of the palette."""
NEUTRAL = "var(--grey)"

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Pen:
    """Look of a series: a colour of CSS, a pattern of dashes and the path of a marker."""

    colour: str
    dash: str
    marker: str


def pen(place: int, dashed: bool = False) -> Pen:
    """The look of the series at this place, the same as in all other figures of RayFed."""
    look: Look = looks(str(i) for i in range(place + 1))[str(place)]
    dash = "5 4" if dashed else DASHES[look.line]
    return Pen(f"var(--c{place % COLOURS})", dash, PATHS[look.marker])


@dataclass(frozen=True)
class Scale:
    """Maps numbers from [low, high] to the picture, from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        return self.start + (self.end - self.start) * ((value - self.low) / span if span else 0.5)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from `low` to `high`, at most `most` of them.

    >>> ticks(0, 1), ticks(3, 47)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [10.0, 20.0, 30.0, 40.0])
    """
    if not high > low:
        return [low]
    raw = (high - low) / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(step * i, 12) for i in range(first, last + 1)]


def whole_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """The same at whole numbers alone."""
    found = [tick for tick in ticks(low, high, most) if float(tick).is_integer()]
    return found or [float(math.ceil(low))]


def short(value: float) -> str:
    """A number at a tick, without needless digits.

    >>> short(20.0), short(0.25), short(12000), short(1e-7)
    ('20', '0.25', '12,000', '1e-07')
    """
    if value and abs(value) < 1e-4:
        return f"{value:.0e}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"


def text(x: float, y: float, words: str, anchor: str = "middle", turned: bool = False, size: int = 0) -> str:
    """Words at a place."""
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    font = f' font-size="{size}"' if size else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}{font}>{escape(words)}</text>'


def path(points: Iterable[tuple[float, float]]) -> str:
    """Commands of a path through these points, with a gap at those that are not finite."""
    parts = []
    draws = False
    for x, y in points:
        if not (math.isfinite(x) and math.isfinite(y)):
            draws = False
            continue
        parts.append(f"{'L' if draws else 'M'}{x:.1f},{y:.1f}")
        draws = True
    return "".join(parts)


def whole(content: Iterable[str], summary: str, height: float = HEIGHT) -> str:
    """A whole picture.

    Args:
        content: Elements of SVG.
        summary: The picture in a sentence.
        height: Its height.
    """
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(summary)}" '
        f'font-size="{FONT}">{"".join(content)}</svg>'
    )


def image(pixels: npt.NDArray[np.uint8], box: tuple[float, float, float, float]) -> str:
    """An image of shape (rows, columns, 3 or 4), stretched to a box (x, y, width, height)."""
    x, y, width, height = box
    return (
        f'<image href="data:image/png;base64,{png(pixels)}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" preserveAspectRatio="none" style="image-rendering:pixelated"/>'
    )


def png(pixels: npt.NDArray[np.uint8]) -> str:
    """An image of shape (rows, columns, 3 or 4) as PNG in base64."""
    from PIL import Image

    held = io.BytesIO()
    Image.fromarray(pixels).save(held, format="PNG", optimize=True)
    return base64.b64encode(held.getvalue()).decode()


def shaded(values: Floats, low: float, high: float) -> npt.NDArray[np.uint8]:
    """Colours of viridis for numbers of shape (rows, columns); transparent where one is not finite."""
    from matplotlib import colormaps

    share = (values - low) / (high - low) if high > low else np.zeros_like(values)
    found = colormaps["viridis"](np.nan_to_num(share), bytes=True)
    pixels = np.asarray(found, dtype=np.uint8).copy()
    pixels[~np.isfinite(values)] = 0
    return pixels


def thinned(count: int, most: int) -> list[int]:
    """At most `most` of `count` positions, evenly spaced, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({int(i) for i in np.linspace(0, count - 1, most).round()})


def bounds(values: Sequence[float], at_zero: bool = False) -> tuple[float, float]:
    """Lowest and highest of the finite numbers with a little room; (0, 1) where there are none."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return (0.0 if at_zero and low >= 0 else low - room), high + room


MOST_POINTS = 400
"""Largest number of points of a curve; of more, evenly spaced ones are drawn."""
MILLI = 0.1
"""Times below this number of seconds are shown in milliseconds."""
SMALL, LARGE = 0.01, 1e5
"""Numbers outside this range are shown with a power of ten, so that ticks stay short."""
FEW_POINTS = 12
"""Largest number of points that all get a marker; of more, the last one does."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A curve.

    Attributes:
        label: Its name in the legend.
        x, y: Its points.
        low, high: Edges of a band around it; None: no band.
        place: Decides its colour and marker; None: its place in the chart.
        dashed: Draw it dashed.
        steps: It stays the same up to the next point, as a cumulative curve does, from 0 to the end of the
            axis.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    place: int | None = None
    dashed: bool = False
    steps: bool = False

    @property
    def banded(self) -> bool:
        """Whether it has a band with some width."""
        if self.low is None or self.high is None:
            return False
        return any(high > low for low, high in zip(self.low, self.high, strict=True))


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Range, scale and label of an axis.

    Attributes:
        name: Its label.
        kind: What its numbers are.
        low, high: Its ends; None: those of the numbers.
        whole: Ticks at whole numbers alone.
    """

    name: str
    kind: Kind = "number"
    low: float | None = None
    high: float | None = None
    whole: bool = False

    def unit(self, most: float) -> tuple[float, str]:
        """Divisor of the numbers at the ticks up to this size, and the label with the unit."""
        if self.kind in ("percent", "points"):
            return 0.01, f"{self.name}, {'%' if self.kind == 'percent' else 'points'}"
        if self.kind == "seconds":
            return (1.0, f"{self.name}, s") if most >= MILLI else (0.001, f"{self.name}, ms")
        if self.kind == "bytes":
            size, unit = next(((s, u) for s, u in UNITS if most >= s), (1.0, "B"))
            return size, f"{self.name}, {unit}"
        if self.kind in ("number", "count") and most and not SMALL <= most < LARGE:
            power = math.floor(math.log10(most))
            return 10.0**power, f"{self.name}, 1e{power}"
        return 1.0, self.name


ROUND = Axis(name="round", kind="count", whole=True)


def share_axis(name: str) -> Axis:
    """An axis of a score by the name of its metric: of shares, from 0 to 100 %."""
    if share_of(name) == 1:
        return Axis(name=name)
    return Axis(name=name, kind="percent", low=0.0, high=1.0)


def curves(title: str, series: Sequence[Series], x: Axis, y: Axis, caption: str = "") -> Figure:
    """A chart of curves over a common horizontal axis.

    Args:
        title: What is shown.
        series: The curves; those without a finite point are left out.
        x: The horizontal axis.
        y: The vertical axis.
        caption: How to read it.
    """
    series = [one for one in series if any(math.isfinite(v) for v in one.y)]
    places = sorted({v for one in series for v in one.x})
    columns, rows = _numbers(series, places, x, y)
    sx, sy = _scales(series, places, x, y)
    drawn: list[str] = [*_frame(sx, sy, x, y)]
    legend = []
    for number, one in enumerate(series):
        drawing = pen(number if one.place is None else one.place, one.dashed)
        legend.append(Entry(one.label, drawing.colour, drawing.dash, drawing.marker))
        drawn.append(f'<g data-series="{number}">{_curve(one, drawing, sx, sy)}</g>')
    drawn.append(f'<line class="rule" y1="{TOP}" y2="{HEIGHT - BOTTOM}" x1="-9" x2="-9"/>')
    summary = _in_words(title, series, x, y)
    return Figure(
        title=title,
        caption=caption,
        svg=whole(drawn, summary),
        summary=summary,
        columns=columns,
        rows=rows,
        legend=legend,
        hover="lines",
        places={"x": [sx.low, sx.high, sx.start, sx.end], "bands": [one.banded for one in series]},
    )


def _numbers(
    series: Sequence[Series], places: Sequence[float], x: Axis, y: Axis
) -> tuple[list[Column], list[list[Cell]]]:
    """Columns and rows: the horizontal axis, then each curve and the edges of its band."""
    columns = [Column(x.name, x.kind)]
    found: list[dict[float, float]] = []
    for one in series:
        edges = (("", one.y), *((("lowest", one.low), ("highest", one.high)) if one.banded else ()))
        for edge, values in edges:
            columns.append(Column(f"{one.label}, {edge}" if edge else one.label, y.kind))
            found.append(dict(zip(one.x, values or (), strict=True)))
    rows: list[list[Cell]] = [[place, *(column.get(place) for column in found)] for place in places]
    return columns, rows


def _scales(series: Sequence[Series], places: Sequence[float], x: Axis, y: Axis) -> tuple[Scale, Scale]:
    every = [v for one in series for values in (one.y, one.low, one.high) for v in values or ()]
    low, high = bounds(every, at_zero=y.kind in ("bytes", "seconds", "count", "points"))
    left, right = (min(places), max(places)) if places else (0.0, 1.0)
    if x.whole and left == right:
        left, right = left - 0.5, right + 0.5
    ends = (left if x.low is None else x.low, right if x.high is None else x.high)
    heights = (low if y.low is None else y.low, high if y.high is None else y.high)
    return Scale(*ends, LEFT, WIDTH - RIGHT), Scale(*heights, HEIGHT - BOTTOM, TOP)


def _frame(sx: Scale, sy: Scale, x: Axis, y: Axis) -> list[str]:
    """Grid, ticks and labels of both axes."""
    drawn = []
    unit, label = y.unit(max(abs(sy.low), abs(sy.high)))
    for tick in ticks(sy.low / unit, sy.high / unit):
        at = sy(tick * unit)
        drawn.append(f'<line class="mesh" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        drawn.append(text(LEFT - 6, at + 4, short(tick), "end"))
    drawn.append(text(12, (TOP + HEIGHT - BOTTOM) / 2, label, turned=True))
    unit, label = x.unit(max(abs(sx.low), abs(sx.high)))
    places = (whole_ticks if x.whole else ticks)(sx.low / unit, sx.high / unit)
    drawn += [text(sx(tick * unit), HEIGHT - BOTTOM + 17, short(tick)) for tick in places]
    drawn.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 7, label))
    drawn.append(f'<path class="axis" d="M{LEFT},{TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none"/>')
    return drawn


def _curve(one: Series, pen: Pen, sx: Scale, sy: Scale) -> str:
    """The band, the line and the markers of a curve."""
    chosen = thinned(len(one.x), MOST_POINTS)
    points = [(sx(one.x[i]), sy(one.y[i])) for i in chosen]
    drawn = []
    if one.banded and one.low is not None and one.high is not None:
        edge = [(sx(one.x[i]), sy(one.high[i])) for i in chosen]
        edge += [(sx(one.x[i]), sy(one.low[i])) for i in reversed(chosen)]
        edge = [(a, b) for a, b in edge if math.isfinite(b)]
        drawn.append(f'<path d="{path(edge)}z" fill="{pen.colour}" fill-opacity=".16"/>')
    line = _stairs(points, sx, sy) if one.steps else points
    dash = f' stroke-dasharray="{pen.dash}"' if pen.dash else ""
    drawn.append(f'<path class="line" d="{path(line)}" stroke="{pen.colour}"{dash}/>')
    finite = [point for point in points if math.isfinite(point[1])]
    for a, b in finite if len(finite) <= FEW_POINTS else finite[-1:]:
        drawn.append(f'<path d="{pen.marker}" transform="translate({a:.1f} {b:.1f})" fill="{pen.colour}"/>')
    return "".join(drawn)


def _stairs(points: Sequence[tuple[float, float]], sx: Scale, sy: Scale) -> list[tuple[float, float]]:
    """The corners of a cumulative curve through these points."""
    found = [(sx.start, sy(0.0))]
    for x, y in points:
        found += [(x, found[-1][1]), (x, y)]
    return [*found, (sx.end, found[-1][1])]


def _in_words(title: str, series: Sequence[Series], x: Axis, y: Axis) -> str:
    """The last value of each curve, of at most ten."""
    column = Column(y.name, y.kind)
    ends = [f"{one.label} {column.show(one.y[-1])}" for one in series[:10]]
    more = f" and {len(series) - 10} more" if len(series) > 10 else ""
    return f"{title}. {y.name} over {x.name}; last values: {', '.join(ends)}{more}."


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
    pixels = _grouped(cells.values) if groups else shaded(cells.values, dark, high)
    drawn = [image(pixels, box), *_names(cells, box, each)]
    foot = TOP + box[3] + 42
    drawn += [] if groups else _colour_bar(cells.value, dark, high, foot)
    summary = f"{title}. {count} rows ({cells.row}), {len(cells.across)} columns ({cells.column}); "
    summary += f"{cells.value.name} from {cells.value.show(low)} to {cells.value.show(high)}."
    rows = [[name, *_plain(values)] for name, values in zip(cells.down, cells.values, strict=True)]
    return Figure(
        title=title,
        caption=caption,
        svg=whole(drawn, summary, foot + (4 if groups else 34)),
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
            drawn.append(text(left - 5, top + each * (number + 0.5) + 4, shown, "end", size=12))
    else:
        step = max(1, round(len(cells.down) / 8))
        drawn += [
            text(left - 5, top + each * (number + 0.5) + 4, str(number + 1), "end", size=12)
            for number in range(0, len(cells.down), step)
        ]
        drawn.append(text(13, top + height / 2, cells.row, turned=True))
    longest = max((len(name) for name in cells.across), default=1)
    room = max(1, int(width / (9.0 + 7.0 * longest)))
    step = max(1, math.ceil(len(cells.across) / room))
    for number in range(0, len(cells.across), step):
        at = left + width * (number + 0.5) / len(cells.across)
        drawn.append(text(at, top + height + 15, cells.across[number], size=12))
    return [*drawn, text(left + width / 2, top + height + 32, cells.column)]


def _colour_bar(column: Column, low: float, high: float, foot: float) -> list[str]:
    shades = shaded(np.linspace(0, 1, 64)[None], 0, 1)
    start, width = WIDTH / 2 - 110, 120
    return [
        image(shades, (start, foot + 4, width, 10)),
        text(start - 6, foot + 14, column.show(low), "end", size=12),
        text(start + width + 6, foot + 14, f"{column.show(high)}  {column.heading}", "start", size=12),
    ]
