"""The look of all figures: colours, axes, legends, titles and labels.

Colours are those of Okabe and Ito (Color Universal Design, 2008), whose yellow is left out, because it
cannot be read on white, and of Tol's muted scheme (Colour Schemes, SRON/EPS/TN/09-002, 2021), which
people with colour-blindness can tell apart. Past the tenth a colour comes again with another marker and
line.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from rayfed.columns import share_of
from rayfed.record.atomic_files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
T = TypeVar("T")

PALETTE = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"),
    *("#000000", "#882255", "#999933", "#332288"),
)
DARK_PALETTE = (
    *("#3D8FD1", "#E69F00", "#2BBF92", "#F08A4B", "#DB9CBB", "#8ACDF2"),
    *("#FFFFFF", "#D9759F", "#BDBD55", "#9A8CE0"),
)
"""The same hues in the same order for a dark background, on which some of PALETTE cannot be seen."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")
LINES = ("-", "--", ":", "-.")
FONT = 9
DPI = 110
STYLE = {
    "font.size": FONT,
    "axes.titlesize": FONT,
    "axes.labelsize": FONT,
    "xtick.labelsize": FONT - 1,
    "ytick.labelsize": FONT - 1,
    "legend.fontsize": FONT - 1,
    "legend.frameon": False,
    "figure.titlesize": FONT + 1,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "image.cmap": "viridis",
}
GREY = "#888888"
MOST_ENTRIES = 20
"""Largest number of entries of a legend."""
ENTRY_HEIGHT = 0.19
"""Height of an entry of a legend in inches."""


@dataclass(frozen=True)
class Look:
    """Look of one domain or one method in all figures of a run."""

    colour: str
    marker: str
    line: str


@dataclass(frozen=True)
class Drawing:
    """A figure, and the name of its file without the suffix."""

    name: str
    figure: Figure

    def save(self, folder: Path) -> Path:
        """Write `figures/<name>.png` into a folder."""
        return self.write(folder / "figures" / f"{self.name}.png")

    def write(self, path: Path, maker: str | None = None) -> Path:
        """Write a PNG file, which names its maker if there is one."""
        metadata = None if maker is None else {"Software": maker}
        write_whole(path, lambda p: self.figure.savefig(p, dpi=DPI, format="png", metadata=metadata))
        return path


def looks(names: Iterable[str]) -> dict[str, Look]:
    """The looks of domains, in the order of the data set, or of methods, the main one first."""
    return {
        name: Look(
            PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)], LINES[i // len(PALETTE) % len(LINES)]
        )
        for i, name in enumerate(dict.fromkeys(names))
    }


UNKNOWN = Look(GREY, "o", "-")


def in_style(draw: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that draws, such that all its texts and lines have the sizes of STYLE."""

    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> T:
        import matplotlib as mpl

        with mpl.rc_context(STYLE):  # type: ignore[arg-type]
            return draw(*args, **kwargs)

    return styled


def canvas(
    down: int, across: int, size: tuple[float, float], sharex: bool = False, sharey: bool = False
) -> tuple[Figure, Any]:
    """A figure that leaves room for all its labels, and its axes as an array of shape (down, across).

    Args:
        down: Number of rows of panels.
        across: Number of columns of panels.
        size: Width and height of the whole figure in inches.
        sharex: One horizontal axis for all panels.
        sharey: One vertical axis for all panels.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(down, across, squeeze=False, sharex=sharex, sharey=sharey)


def heading(figure: Figure, *lines: str) -> None:
    """Write the title of a figure, broken where it is wider than the figure."""
    width = int(12 * figure.get_figwidth())
    figure.suptitle("\n".join(part for line in lines for part in textwrap.wrap(line, width)))


def legend(figure: Figure, handles: Sequence[Any], title: str = "") -> None:
    """A legend at the right of all panels, of handles that have labels.

    As many are shown as fit next to the panels, at most MOST_ENTRIES, and the number of the others.
    """
    from matplotlib.lines import Line2D

    most = min(MOST_ENTRIES, int((figure.get_figheight() - 1.0) / ENTRY_HEIGHT))
    shown = list(handles if len(handles) <= most else handles[: most - 1])
    if more := len(handles) - len(shown):
        shown.append(Line2D([], [], linestyle="", label=f"and {more} more"))
    if shown:
        figure.legend(handles=shown, loc="outside right center", title=title or None, alignment="left")


def line_of(look: Look, label: str, held_out: bool = False, marker: bool = True) -> Any:
    """An entry of a legend that looks like the curve of a domain or method."""
    from matplotlib.lines import Line2D

    line: Any = "--" if held_out else look.line
    return Line2D(
        [], [], color=look.colour, marker=look.marker if marker else "", linestyle=line, label=label
    )


def point_of(look: Look, label: str) -> Any:
    """An entry of a legend for a colour alone: a filled square."""
    from matplotlib.patches import Patch

    return Patch(color=look.colour, label=label)


def rounds_axis(axis: Axes, first: int, last: int) -> None:
    """Whole rounds from the first to the last on the horizontal axis."""
    axis.set(xlabel="round", xlim=(first - 0.5, last + 0.5))
    whole_numbers(axis.xaxis)


def whole_numbers(axis: Any) -> None:
    """Ticks of a horizontal or vertical axis at whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))


def shown_figure(width: float, height: float) -> Figure:
    """An empty figure that a notebook shows, whatever the backend. Args: sizes in inches."""
    from io import BytesIO

    from matplotlib.figure import Figure

    class Shown(Figure):
        def _repr_png_(self) -> bytes:
            file = BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

    return Shown(figsize=(width, height), layout="constrained")


def score_axis(axis: Axes, label: str, metric: str) -> None:
    """A vertical axis of scores: from 0 to 100 % for shares, else in the unit of the metric."""
    if share_of(metric) != 1:
        percent_axis(axis, label)
        return
    place = axis.get_subplotspec()
    axis.set(ylabel=label if place is None or place.is_first_col() else "")
    axis.grid(axis="y", alpha=0.3)


def percent_axis(axis: Axes, label: str) -> None:
    """A vertical axis from 0 to 100 %, as the screen shows scores, named in the first column of panels."""
    place = axis.get_subplotspec()
    axis.set(ylabel=f"{label}, %" if place is None or place.is_first_col() else "", ylim=(0, 100))
    axis.grid(axis="y", alpha=0.3)


def every(count: int, most: int) -> range:
    """Numbers of the rows or columns that are labelled: all up to `most`, else every tenth, hundredth, ..."""
    step = 1
    while -(-count // step) > most:
        step *= 10
    return range(0, count, step)


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places nearest to the values, in their order, that are at least `gap` apart and in [low, high].

    Where they do not all fit, they share the whole range evenly.
    """
    order = np.argsort(np.asarray(values, dtype=float), kind="stable")
    gap = min(gap, (high - low) / max(len(order) - 1, 1))
    # Isotonic regression of value - gap * rank: pools of neighbours that push each other, by their mean.
    pools: list[tuple[float, int]] = []
    for rank, i in enumerate(order):
        pools.append((values[i] - gap * rank, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n)]
    top = high - gap * (len(order) - 1)
    flat = [min(max(mean, low), max(top, low)) for mean, size in pools for _ in range(size)]
    places = [0.0] * len(order)
    for rank, (i, base) in enumerate(zip(order, flat, strict=True)):
        places[int(i)] = base + gap * rank
    return places


def end_labels(axis: Axes, ends: Sequence[tuple[float, str, str]], height: float) -> None:
    """Write labels at the right of the panel, each at the height of the end of its curve, none over another.

    Args:
        axis: A panel whose vertical limits are final.
        ends: Last value, text and colour of each curve.
        height: Height of the panel in inches, about.
    """
    low, high = axis.get_ylim()
    at = [(value - low) / (high - low) for value, _, _ in ends]
    gap = 1.45 * (FONT - 2) / 72 / height
    for place, (_, text, colour) in zip(spread(at, gap, 0.02, 0.98), ends, strict=True):
        axis.text(
            1.02,
            place,
            text,
            color=colour,
            transform=axis.transAxes,
            va="center",
            fontsize=FONT - 2,
            clip_on=False,
        )


def place_labels(axis: Axes, places: Sequence[tuple[float, float]], texts: Sequence[str]) -> None:
    """Write a text next to each point such that it covers no point, no other text and no edge of the panel.

    Args:
        axis: The panel.
        places: Points to be left free; the first ones get the texts.
        texts: As many texts as there are points, or fewer.
    """
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    figure = axis.get_figure(root=True)
    if figure is None:
        return
    figure.draw_without_rendering()
    inside = axis.get_window_extent()
    points = axis.transData.transform(np.asarray(places, dtype=float))
    taken = [Bbox.from_bounds(x - 7, y - 7, 14, 14) for x, y in points]
    turns = [(np.cos(a), np.sin(a)) for a in np.arange(8) * np.pi / 4]
    for place, text in zip(places, texts, strict=False):
        note = axis.annotate(text, place, xytext=(0, 0), textcoords="offset points", fontsize=FONT - 1)
        note.set_path_effects([withStroke(linewidth=2, foreground="white")])
        for distance, (x, y) in ((d, turn) for d in (9, 16, 24, 34, 46) for turn in turns):
            note.set(
                position=(distance * x, distance * y),
                ha="left" if x > 0.3 else "right" if x < -0.3 else "center",
                va="bottom" if y > 0.3 else "top" if y < -0.3 else "center",
            )
            box = note.get_window_extent()
            held = inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
            if held and not box.count_overlaps(taken):
                break
        taken.append(note.get_window_extent())
