"""Figures of methods: weights, groups, blocks and generalization gaps of clients, and the partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rayfed.record.recorded_run import RecordedRun, domain_order
from rayfed.report import style
from rayfed.report.final_table import span

if TYPE_CHECKING:
    import pyarrow as pa


Rows = Sequence[Mapping[str, Any]]
MOST_GROUP_PANELS = 12
"""Largest number of domains that get a panel each."""
MOST_LABELS = 6
"""Largest number of clients of a domain that are all named; of more, the lowest and the highest are."""


@style.in_style
def aggregation_weights(run: RecordedRun) -> style.Drawing | None:
    """Weight of every client over the rounds: one panel a domain, the clients named at the curves."""
    rows = [row for row in run.rows("aggregation") if row["weight"] is not None]
    if not rows:
        return None
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        domain = run.owners.get(row["client"], "all clients")
        points = curves.setdefault(domain, {}).setdefault(row["client"], [])
        points.append((row["round"], row["weight"]))
    numbers = [row["round"] for row in rows]
    order, known = run.order(list(curves)), style.looks(run.domains)
    shown = order[:MOST_GROUP_PANELS]
    across = min(len(shown), 3)
    down = -(-len(shown) // across)
    figure, axes = style.canvas(down, across, (0.4 + 2.9 * across, 0.8 + 1.9 * down), sharey=True)
    for axis in axes.flat[len(shown) :]:
        axis.axis("off")
    top = 1.08 * max(row["weight"] for row in rows) or 1.0
    for axis, domain in zip(axes.flat, shown, strict=False):
        style.rounds_axis(axis, min(numbers), max(numbers))
        axis.set(ylabel="weight" if axis in axes[:, 0] else "", ylim=(0, top), title=domain)
        axis.grid(axis="y", alpha=0.3)
        _weights_of(axis, curves[domain], known.get(domain, style.UNKNOWN))
    what = "Aggregation weights of the clients, by domain"
    what += f"; the first {len(shown)} of {len(order)} domains" if len(order) > len(shown) else ""
    style.heading(figure, *run.title(what, span(numbers)))
    return style.Drawing("aggregation_weights", figure)


def _weights_of(axis: Any, clients: Mapping[str, Sequence[tuple[int, float]]], look: style.Look) -> None:
    """The curves of the clients of one domain, told apart by line and marker, with names at their ends."""
    ends = []
    for place, (name, points) in enumerate(clients.items()):
        line = style.LINES[place % len(style.LINES)]
        marker = style.MARKERS[place % len(style.MARKERS)]
        axis.plot(*zip(*points, strict=True), line, color=look.colour, marker=marker, alpha=0.85)
        ends.append((points[-1][1], name, look.colour))
    ends.sort()
    named = ends if len(ends) <= MOST_LABELS else [ends[0], ends[-1]]
    style.end_labels(axis, named, height=1.2)


@style.in_style
def cluster_flow(run: RecordedRun) -> style.Drawing | None:
    """Group of each client over the rounds: a band a group, with groups matched between rounds."""
    rows = run.rows("clusters")
    if not rows:
        return None
    groups = matched_groups(rows)
    clients = list(dict.fromkeys(row["client"] for row in rows))
    clients.sort(key=lambda cid: run.domains.index(run.owners[cid]) if cid in run.owners else 0)
    used = sorted({group for of in groups.values() for group in of.values()})
    places = {group: place for place, group in enumerate(used)}
    known = style.looks(run.domains)
    figure, axes = style.canvas(1, 1, (7.2, 1.2 + 0.75 * len(used)))
    axis = axes[0, 0]
    for place in range(len(used)):
        axis.axhspan(place - 0.45, place + 0.45, color="#EFEFEF", linewidth=0, zorder=0)
    for rank, cid in enumerate(clients):
        shift = 0.7 * (rank / max(len(clients) - 1, 1) - 0.5)
        points = [(number, places[of[cid]] + shift) for number, of in sorted(groups.items()) if cid in of]
        look = known.get(run.owners.get(cid, ""), style.UNKNOWN)
        axis.plot(
            *zip(*points, strict=True), "-", color=look.colour, marker=look.marker, linewidth=1, alpha=0.8
        )
    style.rounds_axis(axis, min(groups), max(groups))
    axis.set_yticks(range(len(used)), [f"group {group}" for group in used])
    axis.set(ylim=(-0.55, len(used) - 0.45))
    style.heading(figure, *run.title("Group of each client over the rounds", span(list(groups))))
    owners = {run.owners.get(cid, "") for cid in clients}
    style.legend(figure, [style.line_of(look, d) for d, look in known.items() if d in owners], "domain")
    return style.Drawing("cluster_flow", figure)


def client_map(run: RecordedRun) -> style.Drawing | None:
    """t-SNE of the clients' representations in the last round: colour is the domain, digit the group."""
    rows = run.rows("clusters")
    if not rows:
        return None
    groups = matched_groups(rows)
    last = max(groups)
    now = [
        {
            **row,
            "cluster": groups[last][row["client"]],
            "domain": run.owners.get(row["client"], row["domain"]),
        }
        for row in rows
        if row["round"] == last
    ]
    return _map(run, now, "cluster", "Representations of the clients (t-SNE); digit: group", "client_map")


def sample_map(run: RecordedRun) -> style.Drawing | None:
    """t-SNE of the representations of single images: colour is the domain, digit the class."""
    what = "Representations of single images (t-SNE); digit: class"
    return _map(run, run.rows("samples"), "label", what, "sample_map")


@style.in_style
def _map(run: RecordedRun, rows: Rows, mark: str, what: str, name: str) -> style.Drawing | None:
    """t-SNE figure of representations; None for fewer than four.

    Args:
        rows: Rows with the columns round, representation, domain and `mark`.
        mark: Column with the number that is drawn at each point.
        what: First line of the title.
        name: Name of the file.
    """
    rows = [row for row in rows if None not in row["representation"]]
    if len(rows) < 4:
        return None
    from sklearn.manifold import TSNE

    h = np.array([row["representation"] for row in rows])
    perplexity = min(30.0 if mark == "label" else 10.0, (len(rows) - 1) / 3)
    points = TSNE(perplexity=perplexity, random_state=0, init="pca").fit_transform(h)
    figure, axes = style.canvas(1, 1, (6.2, 4.6))
    axis = axes[0, 0]
    size = 90 if len(rows) <= 60 else 45
    kinds, known = dict.fromkeys((row["domain"], row[mark]) for row in rows), style.looks(run.domains)
    for domain, number in kinds:
        chosen = [i for i, row in enumerate(rows) if (row["domain"], row[mark]) == (domain, number)]
        digit = {"marker": f"${number}$", "s": size * len(str(number)), "linewidths": 0.2}
        colour = known.get(domain, style.UNKNOWN).colour
        axis.scatter(points[chosen, 0], points[chosen, 1], color=colour, **digit)
    axis.set(xticks=[], yticks=[], xlabel="first coordinate", ylabel="second coordinate")
    style.heading(figure, *run.title(what, span([row["round"] for row in rows])))
    shown = {row["domain"] for row in rows}
    entries = [style.point_of(look, d) for d, look in known.items() if d in shown]
    style.legend(figure, entries, "domain")
    return style.Drawing(name, figure)


def matched_groups(rows: Rows) -> dict[int, dict[str, int]]:
    """Group of each client by round, renumbered to match the groups of the rounds before.

    Group numbers are arbitrary in every round. For figures, each group gets the number such that as many
    clients as possible keep the number that they had when they last took part.
    """
    from scipy.optimize import linear_sum_assignment

    matched: dict[int, dict[str, int]] = {}
    before: dict[str, int] = {}
    for number in sorted({row["round"] for row in rows}):
        now = {row["client"]: row["cluster"] for row in rows if row["round"] == number}
        size = 1 + max([*now.values(), *before.values()])
        overlap = np.zeros((size, size))
        for cid, group in now.items():
            if cid in before:
                overlap[group, before[cid]] += 1
        old, new = linear_sum_assignment(overlap, maximize=True)
        renamed = dict(zip(old.tolist(), new.tolist(), strict=True))
        matched[number] = {cid: renamed[group] for cid, group in now.items()}
        before = before | matched[number]
    return matched


MOST_ALLOCATION_PANELS = 15
"""Largest number of clients that get a panel each."""
COLOURS = ("#F2F2F2", "#0072B2")
"""A block that a client does not hold, and one that it holds."""


@style.in_style
def allocations(run: RecordedRun) -> style.Drawing | None:
    """Blocks in each round: a panel with the number of clients that hold them, then a panel a client."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    rows = run.rows("allocations")
    if not rows:
        return None
    blocks = 1 + max(max(row["blocks"], default=0) for row in rows)
    numbers = [row["round"] for row in rows]
    first = min(numbers)
    grids = {
        cid: np.zeros((blocks, max(numbers) - first + 1)) for cid in dict.fromkeys(r["client"] for r in rows)
    }
    for row in rows:
        grids[row["client"]][row["blocks"], row["round"] - first] = 1
    own = grids if len(grids) <= MOST_ALLOCATION_PANELS else {}
    across = min(1 + len(own), 4)
    down = -(-(1 + len(own)) // across)
    figure, axes = style.canvas(down, across, (1.8 + 1.9 * across, 0.7 + 1.7 * down))
    for axis in axes.flat[1 + len(own) :]:
        axis.axis("off")
    extent = (first - 0.5, max(numbers) + 0.5, -0.5, blocks - 0.5)

    def draw(axis: Any, name: str, grid: Any, top: int, colours: Any) -> Any:
        whole = {"aspect": "auto", "origin": "lower", "interpolation": "nearest", "extent": extent}
        picture = axis.imshow(grid, vmin=0, vmax=top, cmap=colours, **whole)
        axis.set_title(name)
        style.rounds_axis(axis, first, max(numbers))
        style.whole_numbers(axis.yaxis)
        axis.set_ylabel("block")
        return picture

    counts = draw(axes.flat[0], "clients that hold a block", sum(grids.values()), len(grids), "viridis")
    bar = figure.colorbar(counts, ax=axes.flat[0])
    style.whole_numbers(bar.ax.yaxis)
    for axis, (name, grid) in zip(axes.flat[1:], own.items(), strict=False):
        draw(axis, name, grid, 1, ListedColormap(COLOURS))
    if own:
        words = ("does not hold", "holds")
        entries = [
            Patch(facecolor=c, edgecolor=style.GREY, label=w) for c, w in zip(COLOURS, words, strict=True)
        ]
        style.legend(figure, entries[::-1], "a client")
    style.heading(figure, *run.title("Blocks of the model that each client holds", span(numbers)))
    return style.Drawing("allocations", figure)


LABELS = {
    "gap_fedavg": "FedAvg's weights",
    "gap": "weights of the round before",
    "gap_ga": "after one step of GA",
    "gap_faa": "FAA's weights, as used",
}
"""Weights under which the gaps in the table `gaps` were measured, by the name of the model there."""
GA_LABEL = "GA's weights, as used"
"""The same for `gap` in a run of GA, which averages with these weights; FAA only begins with them."""

Curves = dict[str, list[tuple[int, float]]]


def gap_variances(run: RecordedRun) -> Curves:
    """Variance of the clients' gaps by the weights of the mean model: (round, variance), ascending.

    The variance is the sum over pairs of clients of squared differences (FFT-GP, Eq. 6), from the table
    `gaps`. All values of a round are computed from the same updates. Rounds in which a gap is not finite are
    left out; without the table there are no curves.
    """
    values: dict[str, dict[int, list[float]]] = {name: {} for name in LABELS}
    for row in run.rows("gaps"):
        gap = float("nan") if row["gap"] is None else row["gap"]  # none: it was not finite
        values.setdefault(row["model"], {}).setdefault(row["round"], []).append(gap)
    curves: Curves = {}
    for name, rounds in values.items():
        points = [(number, _over_pairs(gaps)) for number, gaps in sorted(rounds.items())]
        points = [(number, variance) for number, variance in points if np.isfinite(variance)]
        if points:
            curves[name] = points
    return curves


def _over_pairs(gaps: list[float]) -> float:
    """Sum over pairs of squared differences: 2 M times the sum of squared deviations of the M gaps."""
    g = np.asarray(gaps, dtype=np.float64)
    return 2 * len(g) * float(((g - g.mean()) ** 2).sum())


@style.in_style
def gap_variance(run: RecordedRun) -> style.Drawing | None:
    """FFT-GP's Figure 6: the curve of the method itself is bold, the others are those it is compared with.

    A run of FAA has the curves of FAA's and of FedAvg's weights only with server.compare=true; without it,
    the title says so.
    """
    curves = gap_variances(run)
    if not curves:
        return None
    ga = curves.keys() == {"gap"}
    own = "gap" if ga else "gap_faa"
    figure, axes = style.canvas(1, 1, (6.6, 3.4))
    axis = axes[0, 0]
    entries = []
    for name, look in style.looks((*LABELS, *curves)).items():
        if name not in curves:
            continue
        width = 2.6 if name == own else 1.2
        axis.plot(
            *zip(*curves[name], strict=True), "-", color=look.colour, marker=look.marker, linewidth=width
        )
        entries.append(style.line_of(look, GA_LABEL if ga else LABELS.get(name, name)))
        entries[-1].set_linewidth(width)
    if all(variance > 0 for points in curves.values() for _, variance in points):
        axis.set_yscale("log")
    numbers = [number for points in curves.values() for number, _ in points]
    style.rounds_axis(axis, min(numbers), max(numbers))
    axis.set(ylabel="variance, sum over pairs")
    axis.grid(axis="y", alpha=0.3)
    what = "Variance of the clients' generalization gaps"
    if own not in curves:
        what += " (FAA's own weights are measured with server.compare=true)"
    style.heading(figure, *run.title(what, span(numbers)))
    style.legend(figure, entries, "mean model under")
    return style.Drawing("gap_variance", figure)


MOST_NAMES = 30
"""Largest number of clients or classes that are all named; of more, every tenth, hundredth, ... is."""


def partition_map(run: RecordedRun) -> style.Drawing | None:
    """Figure of a run's `partition.parquet`; None without that file or without training samples."""
    if run.partition is None:
        return None
    classes = run.about_partition.get("classes", [])
    return draw_partition(run.partition, [] if run.segmentation else classes, run.name, not run.segmentation)


@style.in_style
def draw_partition(
    table: pa.Table, classes: Sequence[str], name: str, labelled: bool = True
) -> style.Drawing | None:
    """Draw a partition.

    Args:
        table: Columns label, domain, client, split, index, as in `partition.parquet`.
        classes: Names of the labels.
        name: Second line of the title: the run or the data set.
        labelled: Whether each sample has one label. In segmentation it has none, and only the numbers of
            samples are drawn.

    Returns:
        None if no client has training samples.
    """
    label, split = (np.asarray(table[key]) for key in ("label", "split"))
    client, domain = (np.asarray(table[key], dtype=str) for key in ("client", "domain"))
    train = (split == "train") & (client != "")
    if not train.any():
        return None
    names, rows = np.unique(client[train], return_inverse=True)
    owner = dict(zip(client[train].tolist(), domain[train].tolist(), strict=True))
    height = min(max(1.6 + 0.2 * len(names), 3.0), 12)
    height += (
        LETTER * max(map(len, class_names(classes, len(classes))[1])) if labelled and len(classes) else 0
    )
    figure, axes = style.canvas(1, 1 + labelled, (8.4 if labelled else 6.0, height), sharey=True)
    if labelled:
        counts = np.zeros((len(names), max(len(classes), int(label.max()) + 1)))
        np.add.at(counts, (rows, label[train]), 1)
        _shares(figure, axes[0, 0], counts, classes)
    right = axes[0, -1]
    every = looks_of(table)
    colours = [every[owner[cid]].colour for cid in names]
    right.barh(range(len(names)), np.bincount(rows), color=colours, height=0.8)
    right.set(xlabel="training samples", ylim=(len(names) - 0.5, -0.5))
    style.whole_numbers(right.xaxis)
    shown = style.every(len(names), MOST_NAMES)
    axes[0, 0].set_yticks(shown, [names[i] for i in shown], fontsize=style.FONT - 2)
    style.heading(figure, "Training samples of the clients" + ", by class and number" * labelled, name)
    owners = set(owner.values())
    style.legend(figure, [style.point_of(look, d) for d, look in every.items() if d in owners], "domain")
    return style.Drawing("partition", figure)


LETTER = 0.06
"""Height in inches that a letter of a name of a class adds to the figure, because long names are upright."""
MOST_LETTERS = 24
"""Letters of a name of a class that are shown."""


def class_names(classes: Sequence[str], total: int) -> tuple[Sequence[int], list[str]]:
    """The numbers of the classes that have room, and their names, cut where they are long.

    Args:
        total: Number of classes; where it is not that of the names, numbers are shown.
    """
    shown = style.every(total, MOST_NAMES)
    names = [str(classes[i]) if len(classes) == total else str(i) for i in shown]
    return shown, [n if len(n) <= MOST_LETTERS else f"{n[: MOST_LETTERS - 3]}..." for n in names]


def looks_of(table: pa.Table) -> dict[str, style.Look]:
    """The look of every domain of a manifest."""
    return style.looks(domain_order(table))


def _shares(figure: Any, axis: Any, counts: Any, classes: Sequence[str]) -> None:
    """Draw the share of each class in a client's training samples, and what the colours mean.

    Args:
        axis: Its panel for the shares.
        counts: Number of training samples by client and class, shape (M, C).
        classes: Names of the classes; numbers are shown where there are not C names.
    """
    shares = 100 * counts / counts.sum(axis=1, keepdims=True)
    picture = axis.imshow(shares, aspect="auto", vmin=0, vmax=shares.max(), interpolation="nearest")
    axis.set(xlabel="class")
    shown, names = class_names(classes, counts.shape[1])
    turn = 0 if max(map(len, names)) * len(names) <= 36 else 90
    axis.set_xticks(shown, names, rotation=turn, fontsize=style.FONT - 2)
    figure.colorbar(picture, ax=axis, label="share of samples, %", location="right")
