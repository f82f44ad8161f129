"""Charts of curves and heat maps as figures of the page, drawn by matplotlib. Their numbers go with them.

Colours are written as variables of CSS, so that a picture suits a light and a dark page.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from rayfed.columns import Kind, share_of
from rayfed.report.page.parts import Entry, Figure
from rayfed.report.style import LINES, PALETTE, STYLE, every, looks, whole_numbers
from rayfed.terminal.table_formats import UNITS, Cell, Column

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Picture

WIDTH = 480
"""Width of a picture. A phone shows it at three quarters of that in pixels, where its texts are legible."""
HEIGHT = 280
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 44
"""Room around the axes."""
DASHES = dict(zip(LINES, ((), (7, 4), (2, 3), (8, 3, 2, 3)), strict=True))
"""Patterns of lines by the names that matplotlib gives them."""
HELD_OUT = (5, 4)
"""Pattern of a dashed curve."""
INK, SOFT, LINE = "#010203", "#010204", "#010205"
"""Stand for the colours `--ink`, `--soft` and `--line` of the page, until a drawing is text."""
VARIABLES = {INK: "var(--ink)", SOFT: "var(--soft)", LINE: "var(--line)"}
VARIABLES |= {f"#0102{i + 16:02x}": f"var(--c{i})" for i in range(len(PALETTE))}
"""The variable of CSS for each of these colours and for those of the palette."""
LOOK = STYLE | {
    **dict.fromkeys(("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize"), 13),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    "axes.edgecolor": SOFT,
    "grid.color": LINE,
    "grid.alpha": 1.0,
    "axes.formatter.useoffset": False,
    "xtick.major.size": 0,
    "xtick.major.pad": 8,
    "ytick.major.size": 0,
    "lines.linewidth": 1.8,
    "lines.markersize": 7,
    "lines.scale_dashes": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "rayfed",
    "font.sans-serif": ["DejaVu Sans"],
}
"""Settings of matplotlib; lengths are in pixels of the picture, because it is saved with 72 dots per inch."""

Floats = npt.NDArray[np.float64]


def colour(place: int) -> str:
    """Stands for the colour of the series at this place, which is the same in all figures of RayFed."""
    return f"#0102{place % len(PALETTE) + 16:02x}"


def marker_path(marker: str) -> str:
    """A marker of matplotlib around (0, 0), as the attribute `d` of a path."""
    from matplotlib.markers import MarkerStyle

    style = MarkerStyle(marker)
    shapes = style.get_path().transformed(style.get_transform()).to_polygons()
    corners = [7.0 * np.asarray(shape, dtype=float) for shape in shapes]
    return "".join(f"M{'L'.join(f'{x:.1f},{-y:.1f}' for x, y in shape)}z" for shape in corners)


def canvas(box: tuple[float, float, float, float], height: float) -> tuple[Picture, Axes]:
    """An empty picture with axes in a box (x, y, width, height), in pixels from the upper left corner."""
    from matplotlib.figure import Figure

    x, y, width, tall = box
    drawing = Figure(figsize=(WIDTH / 72, height / 72), dpi=72)
    drawing.patch.set_visible(False)
    axes = drawing.add_axes((x / WIDTH, 1 - (y + tall) / height, width / WIDTH, tall / height))
    axes.patch.set_visible(False)
    return drawing, axes


def svg_of(drawing: Picture, summary: str, more: str = "") -> str:
    """A picture as one element of HTML.

    Args:
        drawing: The picture.
        summary: The same in a sentence.
        more: Elements of SVG that are added.
    """
    held = io.StringIO()
    drawing.savefig(held, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = held.getvalue()
    text = text[text.index("<g ") : text.rindex("</svg>")]
    text = re.sub(r'<g id="(series|band)-(\d+)">', r'<g data-\1="\2" class="line">', text)
    shapes = dict(re.findall(r'<path id="(m\w+)" d="([^"]*)"', text))  # markers; a page has no id twice
    text = re.sub(
        r'<use xlink:href="#(m\w+)" x="([^"]*)" y="([^"]*)"',
        lambda match: f'<path d="{shapes[match[1]]}" transform="translate({match[2]} {match[3]})"',
        text,
    )
    text = re.sub(r'<defs>.*?</defs>|<!--.*?-->| clip-path="[^"]*"| id="[^"]*"', "", text, flags=re.DOTALL)
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"-?\d+\.\d{2,}", _short, tag[0]), text)
    text = re.sub(r"#0102[0-9a-f]{2}", lambda match: VARIABLES[match[0]], text)
    text = re.sub(r'<g/>|font-family: [^;"]*; ?| transform="rotate\(-0 [^"]*"', "", text)
    text = re.sub(r"(?<=base64,)\s+", "", text)
    text = re.sub(r"\s*\n\s*", " ", text)
    width, height = drawing.get_size_inches() * 72
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(summary)}">'
        f"{text}{more}</svg>"
    )


def _short(match: re.Match[str]) -> str:
    """A coordinate with one decimal at most; labels, which are no part of a tag, keep all of theirs."""
    return f"{float(match[0]):.1f}".removesuffix(".0")


def thin(count: int, most: int) -> list[int]:
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
    def has_band(self) -> bool:
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


def percent_axis(name: str) -> Axis:
    """An axis of shares, from 0 to 100 %."""
    return Axis(name=name, kind="percent", low=0.0, high=1.0)


def share_axis(metric: str) -> Axis:
    """An axis of a score by the name of its metric; of one that is a share, from 0 to 100 %."""
    return Axis(name=metric) if share_of(metric) == 1 else percent_axis(metric)


def curves(title: str, series: Sequence[Series], x: Axis, y: Axis, caption: str = "") -> Figure:
    """A chart of curves over a common horizontal axis.

    Args:
        title: What is shown.
        series: The curves; those without a finite point are left out.
        x: The horizontal axis.
        y: The vertical axis.
        caption: How to read it.
    """
    import matplotlib as mpl

    series = [one for one in series if any(math.isfinite(v) for v in one.y)]
    places = sorted({v for one in series for v in one.x})
    columns, rows = _numbers(series, places, x, y)
    summary = _in_words(title, series, x, y)
    box = (LEFT, TOP, WIDTH - RIGHT - LEFT, HEIGHT - BOTTOM - TOP)
    rule = f'<line class="rule" y1="{TOP}" y2="{HEIGHT - BOTTOM}" x1="-9" x2="-9"/>'
    legend = []
    with mpl.rc_context(LOOK):  # type: ignore[arg-type]
        drawing, axes = canvas(box, HEIGHT)
        (low, high), (bottom, top) = _ends(series, places, x, y)
        across, down = x.unit(max(abs(low), abs(high))), y.unit(max(abs(bottom), abs(top)))
        axes.set(xlim=(low / across[0], high / across[0]), ylim=(bottom / down[0], top / down[0]))
        axes.set(xlabel=across[1], ylabel=down[1])
        axes.grid(axis="y")
        axes.xaxis.set_label_coords(0.5, -26 / box[3])
        axes.yaxis.set_label_coords(-47 / box[2], 0.5)
        if x.whole:
            whole_numbers(axes.xaxis)
        for number, one in enumerate(series):
            legend.append(_draw(axes, number, one, across[0], down[0]))
        svg = svg_of(drawing, summary, rule)
    return Figure(
        title=title,
        caption=caption,
        svg=svg,
        summary=summary,
        columns=columns,
        rows=rows,
        legend=legend,
        hover="lines",
        places={"x": [low, high, LEFT, WIDTH - RIGHT], "bands": [one.has_band for one in series]},
    )


def _draw(axes: Axes, number: int, one: Series, across: float, down: float) -> Entry:
    """Draw the band, the line and the markers of a curve, in these units; returns its entry in the legend."""
    chosen = thin(len(one.x), MOST_POINTS)
    x = np.asarray(one.x, dtype=float)[chosen] / across
    y = np.asarray(one.y, dtype=float)[chosen] / down
    place = number if one.place is None else one.place
    look = looks(str(i) for i in range(place + 1))[str(place)]
    dashes = HELD_OUT if one.dashed else DASHES[look.line]
    if one.has_band and one.low is not None and one.high is not None:
        low, high = (np.asarray(edge, dtype=float)[chosen] / down for edge in (one.low, one.high))
        axes.fill_between(x, low, high, color=colour(place), alpha=0.16, linewidth=0, gid=f"band-{number}")
    if one.steps:
        x, y = np.array([0.0, *x, axes.get_xlim()[1]]), np.array([0.0, *y, y[-1]])
    finite = np.flatnonzero(np.isfinite(y))
    axes.plot(
        x,
        y,
        color=colour(place),
        linestyle=(0, dashes) if dashes else "-",
        drawstyle="steps-post" if one.steps else "default",
        marker=look.marker,
        markevery=finite.tolist() if len(finite) <= FEW_POINTS else [int(finite[-1])],
        markeredgewidth=0,
        clip_on=False,
        gid=f"series-{number}",
    )
    pattern = " ".join(map(str, dashes))
    return Entry(one.label, VARIABLES[colour(place)], pattern, marker_path(look.marker))


def _numbers(
    series: Sequence[Series], places: Sequence[float], x: Axis, y: Axis
) -> tuple[list[Column], list[list[Cell]]]:
    """Columns and rows: the horizontal axis, then each curve and the edges of its band."""
    columns = [Column(x.name, x.kind)]
    numbers: list[dict[float, float]] = []
    for one in series:
        edges = (("", one.y), *((("lowest", one.low), ("highest", one.high)) if one.has_band else ()))
        for edge, values in edges:
            columns.append(Column(f"{one.label}, {edge}" if edge else one.label, y.kind))
            numbers.append(dict(zip(one.x, values or (), strict=True)))
    rows: list[list[Cell]] = [[place, *(column.get(place) for column in numbers)] for place in places]
    return columns, rows


Ends: TypeAlias = tuple[float, float]


def _ends(series: Sequence[Series], places: Sequence[float], x: Axis, y: Axis) -> tuple[Ends, Ends]:
    """Ends of the horizontal and of the vertical axis."""
    every = [v for one in series for values in (one.y, one.low, one.high) for v in values or ()]
    low, high = bounds(every, at_zero=y.kind in ("bytes", "seconds", "count", "points"))
    left, right = (min(places), max(places)) if places else (0.0, 1.0)
    if left == right:
        left, right = left - 0.5, right + 0.5
    across = (left if x.low is None else x.low, right if x.high is None else x.high)
    return across, (low if y.low is None else y.low, high if y.high is None else y.high)


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
            names of groups, each with its own colour.
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
    import matplotlib as mpl
    from matplotlib.colors import ListedColormap

    groups = cells.colours == "groups"
    count = len(cells.down)
    each = min(22.0, max(3.0, 520.0 / max(count, 1)))
    longest = max((len(name) for name in cells.down), default=0)
    left = min(215.0, 22 + 7.5 * longest) if each >= 11 else LEFT
    box = (left, float(TOP), WIDTH - RIGHT - left, each * count)
    finite = cells.values[np.isfinite(cells.values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    dark = min(low, 0.0) if cells.colours == "zero" else low
    summary = f"{title}. {count} rows ({cells.row}), {len(cells.across)} columns ({cells.column}); "
    summary += f"{cells.value.name} from {cells.value.show(low)} to {cells.value.show(high)}."
    foot = TOP + box[3] + 42
    height = foot + (4 if groups else 34)
    with mpl.rc_context(LOOK | dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 12)):  # type: ignore[arg-type]
        drawing, axes = canvas(box, height)
        values = np.ma.masked_invalid(cells.values % len(PALETTE) if groups else cells.values)
        drawn = axes.imshow(
            values,
            cmap=ListedColormap(PALETTE) if groups else "viridis",
            vmin=-0.5 if groups else dark,
            vmax=len(PALETTE) - 0.5 if groups else max(high, dark + 1e-12),
            aspect="auto",
            interpolation="none",
        )
        axes.spines[:].set_visible(False)
        _name(axes, cells, box, each)
        if not groups:
            place = ((WIDTH / 2 - 110) / WIDTH, 1 - (foot + 14) / height, 120 / WIDTH, 10 / height)
            bar = drawing.colorbar(drawn, cax=drawing.add_axes(place), orientation="horizontal")
            bar.set_ticks([])
            bar.outline.set_visible(False)
            around: dict[str, Any] = {"transform": bar.ax.transAxes, "va": "center", "fontsize": 12}
            bar.ax.text(-0.05, 0.5, cells.value.show(dark), ha="right", **around)
            bar.ax.text(1.05, 0.5, f"{cells.value.show(high)}  {cells.value.heading}", ha="left", **around)
        svg = svg_of(drawing, summary)
    rows = [[name, *_plain(values)] for name, values in zip(cells.down, cells.values, strict=True)]
    return Figure(
        title=title,
        caption=caption,
        svg=svg,
        summary=summary,
        columns=[Column(cells.row), *(Column(name, cells.value.kind) for name in cells.across)],
        rows=rows,
        hover="cells",
        places={"box": box, "column": cells.column, "value": cells.value.name},
    )


def _name(axes: Axes, cells: Cells, box: tuple[float, float, float, float], each: float) -> None:
    """Write names of rows and columns, as many as there is room for."""
    _, _, width, height = box
    if each >= 11:
        names = [name if len(name) <= 26 else f"{name[:25]}…" for name in cells.down]
        axes.set_yticks(range(len(names)), names)
    else:
        numbers = every(len(cells.down), 12)
        axes.set_yticks(numbers, [str(number + 1) for number in numbers])
        axes.set_ylabel(cells.row)
        axes.yaxis.set_label_coords(-47 / width, 0.5)
    longest = max((len(name) for name in cells.across), default=1)
    numbers = range(0, len(cells.across), max(1, math.ceil(len(cells.across) * (12 + 8 * longest) / width)))
    axes.set_xticks(numbers, [cells.across[number] for number in numbers])
    axes.set_xlabel(cells.column)
    axes.xaxis.set_label_coords(0.5, -24 / height)


def _plain(values: Floats) -> list[Cell]:
    return [float(v) if math.isfinite(v) else None for v in values]
