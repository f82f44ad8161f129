"""Charts of curves, with bands, as figures of the page. The numbers behind them go with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rayfed.report.page import svg
from rayfed.report.page.parts import UNITS, Cell, Column, Entry, Figure, Kind
from rayfed.report.page.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Scale

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
    """What an axis shows.

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
        """What numbers up to this size are divided by at the ticks, and the label with the unit."""
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
    """An axis of fractions, from 0 to 100 %."""
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
        drawing = svg.pen(number if one.place is None else one.place, one.dashed)
        legend.append(Entry(one.label, drawing.colour, drawing.dash, drawing.marker))
        drawn.append(f'<g data-series="{number}">{_curve(one, drawing, sx, sy)}</g>')
    drawn.append(f'<line class="rule" y1="{TOP}" y2="{HEIGHT - BOTTOM}" x1="-9" x2="-9"/>')
    summary = _in_words(title, series, x, y)
    return Figure(
        title=title,
        caption=caption,
        svg=svg.whole(drawn, summary),
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
    low, high = svg.bounds(every, at_zero=y.kind in ("bytes", "seconds", "count", "points"))
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
    for tick in svg.ticks(sy.low / unit, sy.high / unit):
        at = sy(tick * unit)
        drawn.append(f'<line class="mesh" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        drawn.append(svg.text(LEFT - 6, at + 4, svg.short(tick), "end"))
    drawn.append(svg.text(12, (TOP + HEIGHT - BOTTOM) / 2, label, turned=True))
    unit, label = x.unit(max(abs(sx.low), abs(sx.high)))
    places = (svg.whole_ticks if x.whole else svg.ticks)(sx.low / unit, sx.high / unit)
    drawn += [svg.text(sx(tick * unit), HEIGHT - BOTTOM + 17, svg.short(tick)) for tick in places]
    drawn.append(svg.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 7, label))
    drawn.append(f'<path class="axis" d="M{LEFT},{TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none"/>')
    return drawn


def _curve(one: Series, pen: svg.Pen, sx: Scale, sy: Scale) -> str:
    """The band, the line and the markers of a curve."""
    chosen = svg.thinned(len(one.x), MOST_POINTS)
    points = [(sx(one.x[i]), sy(one.y[i])) for i in chosen]
    drawn = []
    if one.banded and one.low is not None and one.high is not None:
        edge = [(sx(one.x[i]), sy(one.high[i])) for i in chosen]
        edge += [(sx(one.x[i]), sy(one.low[i])) for i in reversed(chosen)]
        edge = [(a, b) for a, b in edge if math.isfinite(b)]
        drawn.append(f'<path d="{svg.path(edge)}z" fill="{pen.colour}" fill-opacity=".16"/>')
    line = _stairs(points, sx, sy) if one.steps else points
    dash = f' stroke-dasharray="{pen.dash}"' if pen.dash else ""
    drawn.append(f'<path class="line" d="{svg.path(line)}" stroke="{pen.colour}"{dash}/>')
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
