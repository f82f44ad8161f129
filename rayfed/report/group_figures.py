"""Figures of runs that weight and group clients: weights, changes of groups, representations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayfed.record.files import write_whole
from rayfed.record.readers import read_table

Rows = Sequence[Mapping[str, Any]]


def aggregation_weights(folder: Path) -> Path | None:
    """Figure of the weight of every client over the rounds, coloured by domain."""
    rows = [row for row in read_table(folder, "aggregation") if row["weight"] is not None]
    if not rows:
        return None
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    domains, colours = _domains(folder)
    figure, axis = plt.subplots(figsize=(6.4, 4))
    labelled: set[str] = set()
    for cid in dict.fromkeys(row["client"] for row in rows):
        points = [(row["round"], row["weight"]) for row in rows if row["client"] == cid]
        domain = domains.get(cid, cid)
        label = None if domain in labelled else domain
        labelled.add(domain)
        colour = colours.get(domain, "grey")
        axis.plot(*zip(*points, strict=True), "-", marker=".", color=colour, label=label, alpha=0.7)
    axis.set(xlabel="round", ylabel="aggregation weight", ylim=(0, None))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)
    axis.legend(loc="upper right", fontsize=8)
    return save_figure(figure, folder, "aggregation_weights")


def cluster_flow(folder: Path) -> Path | None:
    """Figure of the group of each client over the rounds, with groups matched between rounds."""
    rows = read_table(folder, "clusters")
    if not rows:
        return None
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    domains, colours = _domains(folder)
    lanes = matched_groups(rows)
    clients = list(dict.fromkeys(row["client"] for row in rows))
    figure, axis = plt.subplots(figsize=(8, 4))
    labelled: set[str] = set()
    for place, cid in enumerate(clients):
        shift = 0.7 * (place / max(len(clients) - 1, 1) - 0.5)
        points = [(number, lanes[number][cid] + shift) for number in sorted(lanes) if cid in lanes[number]]
        domain = domains.get(cid, cid)
        label = None if domain in labelled else domain
        labelled.add(domain)
        colour = colours.get(domain, "grey")
        axis.plot(*zip(*points, strict=True), "-", marker=".", color=colour, label=label, alpha=0.7)
    axis.set(xlabel="round", ylabel="group")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(fontsize=8, bbox_to_anchor=(1.01, 1), loc="upper left")
    return save_figure(figure, folder, "cluster_flow")


def client_map(folder: Path) -> Path | None:
    """t-SNE of the clients' representations in the last round, coloured by true domain, marked by group."""
    rows = read_table(folder, "clusters")
    last = [row for row in rows if row["round"] == max(r["round"] for r in rows)]
    return _map(folder, last, "cluster", "clients: colour is the type, number the group", "client_map")


def sample_map(folder: Path) -> Path | None:
    """t-SNE of the representations of single images, coloured by true domain, marked by class."""
    title = "images: colour is the type, number the class"
    return _map(folder, read_table(folder, "samples"), "label", title, "sample_map")


def _map(folder: Path, rows: Rows, mark: str, title: str, name: str) -> Path | None:
    """t-SNE figure of representations; None for fewer than four.

    Args:
        folder: Folder of the run.
        rows: Rows with the columns representation, domain and `mark`.
        mark: Column that is written beside each point.
        title: Title of the figure.
        name: Name of its file.
    """
    rows = [row for row in rows if None not in row["representation"]]
    if len(rows) < 4:
        return None
    import numpy as np
    from matplotlib import pyplot as plt
    from sklearn.manifold import TSNE

    h = np.array([row["representation"] for row in rows])
    perplexity = min(30.0 if mark == "label" else 10.0, (len(rows) - 1) / 3)
    places = TSNE(perplexity=perplexity, random_state=0, init="pca").fit_transform(h)
    colours = _domains(folder)[1]
    figure, axis = plt.subplots(figsize=(5, 4.5))
    for domain in dict.fromkeys(row["domain"] for row in rows):
        chosen = [i for i, row in enumerate(rows) if row["domain"] == domain]
        axis.scatter(
            places[chosen, 0],
            places[chosen, 1],
            s=30,
            alpha=0.6,
            color=colours.get(domain, "grey"),
            label=domain,
        )
    for (x, y), row in zip(places, rows, strict=True):
        axis.annotate(str(row[mark]), (x, y), fontsize=7, xytext=(2, 2), textcoords="offset points")
    axis.set(xticks=[], yticks=[], title=title)
    axis.legend(loc="upper right", fontsize=8)
    return save_figure(figure, folder, name)


def matched_groups(rows: Rows) -> dict[int, dict[str, int]]:
    """Group of each client by round, renumbered to match the groups of the round before.

    Group numbers are arbitrary in every round. For figures, each group gets the number of a group of the
    round before such that as many clients as possible keep their number.
    """
    from scipy.optimize import linear_sum_assignment

    matched: dict[int, dict[str, int]] = {}
    before: dict[str, int] = {}
    for number in sorted({row["round"] for row in rows}):
        now = {row["client"]: row["cluster"] for row in rows if row["round"] == number}
        size = 1 + max([*now.values(), *before.values()])
        overlap = [
            [sum(now[c] == i and before.get(c) == j for c in now) for j in range(size)] for i in range(size)
        ]
        old, new = linear_sum_assignment(overlap, maximize=True)
        renamed = dict(zip(old.tolist(), new.tolist(), strict=True))
        before = {cid: renamed[group] for cid, group in now.items()}
        matched[number] = before
    return matched


def _domains(folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Domain of every client in the manifest, and a colour for every domain."""
    import matplotlib as mpl
    import pyarrow.parquet as pq

    table = pq.read_table(folder / "partition.parquet", columns=["client", "domain"])
    pairs = table.group_by(["client", "domain"]).aggregate([]).to_pylist()
    of = {pair["client"]: pair["domain"] for pair in pairs if pair["client"]}
    palette = mpl.colormaps["tab10"]
    return of, {domain: palette(i % 10) for i, domain in enumerate(sorted(set(of.values())))}


def save_figure(figure: Any, folder: Path, name: str) -> Path:
    """Write `figures/<name>.png` and close the figure."""
    from matplotlib import pyplot as plt

    figure.tight_layout()
    path = folder / "figures" / f"{name}.png"
    write_whole(path, lambda p: figure.savefig(p, dpi=120, format="png"))
    plt.close(figure)
    return path
