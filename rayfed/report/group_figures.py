"""Figures of runs that weight and group clients: weights, changes of groups, representations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rayfed.report import style
from rayfed.report.run_tables import RunTables, span

Rows = Sequence[Mapping[str, Any]]
MOST_GROUP_PANELS = 12
"""Largest number of domains that get a panel each."""
MOST_LABELS = 6
"""Largest number of clients of a domain that are all named; of more, the lowest and the highest are."""


@style.in_style
def aggregation_weights(run: RunTables) -> style.Drawing | None:
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
    order = [d for d in run.domains if d in curves] + [d for d in curves if d not in run.domains]
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
        _weights_of(axis, curves[domain], run.look(domain))
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
def cluster_flow(run: RunTables) -> style.Drawing | None:
    """Group of each client over the rounds: a band a group, with groups matched between rounds."""
    rows = run.rows("clusters")
    if not rows:
        return None
    groups = matched_groups(rows)
    clients = list(dict.fromkeys(row["client"] for row in rows))
    clients.sort(key=lambda cid: list(run.domains).index(run.owners[cid]) if cid in run.owners else 0)
    used = sorted({group for of in groups.values() for group in of.values()})
    places = {group: place for place, group in enumerate(used)}
    figure, axes = style.canvas(1, 1, (7.2, 1.2 + 0.75 * len(used)))
    axis = axes[0, 0]
    for place in range(len(used)):
        axis.axhspan(place - 0.45, place + 0.45, color="#EFEFEF", linewidth=0, zorder=0)
    for rank, cid in enumerate(clients):
        shift = 0.7 * (rank / max(len(clients) - 1, 1) - 0.5)
        points = [(number, places[of[cid]] + shift) for number, of in sorted(groups.items()) if cid in of]
        look = run.look(run.owners.get(cid, ""))
        axis.plot(
            *zip(*points, strict=True), "-", color=look.colour, marker=look.marker, linewidth=1, alpha=0.8
        )
    style.rounds_axis(axis, min(groups), max(groups))
    axis.set_yticks(range(len(used)), [f"group {group}" for group in used])
    axis.set(ylim=(-0.55, len(used) - 0.45))
    style.heading(figure, *run.title("Group of each client over the rounds", span(list(groups))))
    known = dict.fromkeys(run.owners.get(cid, "") for cid in clients)
    style.legend(figure, [style.line_of(look, d) for d, look in run.domains.items() if d in known], "domain")
    return style.Drawing("cluster_flow", figure)


def client_map(run: RunTables) -> style.Drawing | None:
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


def sample_map(run: RunTables) -> style.Drawing | None:
    """t-SNE of the representations of single images: colour is the domain, digit the class."""
    what = "Representations of single images (t-SNE); digit: class"
    return _map(run, run.rows("samples"), "label", what, "sample_map")


@style.in_style
def _map(run: RunTables, rows: Rows, mark: str, what: str, name: str) -> style.Drawing | None:
    """t-SNE figure of representations; None for fewer than four.

    Args:
        run: The run.
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
    kinds = dict.fromkeys((row["domain"], row[mark]) for row in rows)
    for domain, number in kinds:
        chosen = [i for i, row in enumerate(rows) if (row["domain"], row[mark]) == (domain, number)]
        digit = {"marker": f"${number}$", "s": size * len(str(number)), "linewidths": 0.2}
        axis.scatter(points[chosen, 0], points[chosen, 1], color=run.look(domain).colour, **digit)
    axis.set(xticks=[], yticks=[], xlabel="first coordinate", ylabel="second coordinate")
    style.heading(figure, *run.title(what, span([row["round"] for row in rows])))
    known = {row["domain"] for row in rows}
    entries = [style.point_of(look, d) for d, look in run.domains.items() if d in known]
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
