"""Figures of a run, drawn from its tables."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

from rayfed.objective import METRICS, metric_of
from rayfed.record.readers import read_rows
from rayfed.report.feature_map import TITLE as FEATURES
from rayfed.report.feature_map import feature_map
from rayfed.report.gap_figures import gap_variance
from rayfed.report.group_figures import (
    aggregation_weights,
    client_map,
    cluster_flow,
    sample_map,
    save_figure,
)
from rayfed.report.landscape import TITLE as LANDSCAPE
from rayfed.report.landscape import landscape
from rayfed.report.partition_figure import partition_map


def score_by_domain(folder: Path) -> Path | None:
    """Figure of the metric of every domain over the rounds; None where no domain was scored."""
    import matplotlib as mpl

    mpl.use("Agg")
    import pyarrow.parquet as pq
    from matplotlib import pyplot as plt

    table = folder / "clients.parquet"
    rows = pq.read_table(table).to_pylist() if table.exists() else []
    kinds = {"report_domains": "", "report_held_out": " (held out)"}
    scored = [row for row in rows if _is_score(row, kinds)]
    if not scored:
        return None
    metric = scored[0]["metric"]
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in scored:
        key = (row["model"], row["client"] + kinds[row["exchange"]])
        curves.setdefault(key, []).append((row["round"], 100 * row["value"]))
    models = list(dict.fromkeys(model for model, _ in curves))
    figure, axes = plt.subplots(1, len(models), figsize=(6.4 * len(models), 4), squeeze=False, sharey=True)
    for axis, model in zip(axes[0], models, strict=True):
        for (owner, domain), points in curves.items():
            if owner == model:
                style = "--" if domain.endswith("(held out)") else "-"
                axis.plot(*zip(*points, strict=True), style, marker=".", label=domain)
        axis.set(xlabel="round", ylabel=f"test {metric}, %", title=f"{model} model", ylim=(0, 100))
        axis.grid(alpha=0.3)
        if len(curves) <= MOST_PANELS * len(models):
            axis.legend(loc="lower right", fontsize=8)
    return save_figure(figure, folder, metric)


def _is_score(row: Mapping[str, Any], kinds: Container[str]) -> bool:
    """Whether a row holds a score of one of these kinds that is finite."""
    return row["exchange"] in kinds and row["metric"] in METRICS and row["value"] is not None


MOST_PANELS = 15
"""Largest number of clients that get a panel each, and of curves that get a legend."""


def allocations(folder: Path) -> Path | None:
    """Figure of the blocks trained in each round: a panel with the number of holders, then one per client."""
    import matplotlib as mpl

    mpl.use("Agg")
    import numpy as np
    import pyarrow.parquet as pq
    from matplotlib import pyplot as plt

    table = folder / "allocations.parquet"
    rows = pq.read_table(table).to_pylist() if table.exists() else []
    if not rows:
        return None
    size = 1 + max(max(row["blocks"], default=0) for row in rows), max(row["round"] for row in rows)
    grids = {cid: np.zeros(size) for cid in dict.fromkeys(row["client"] for row in rows)}
    for row in rows:
        grids[row["client"]][row["blocks"], row["round"] - 1] = 1
    panels = {"holders": sum(grids.values())} | (grids if len(grids) <= MOST_PANELS else {})
    across = min(len(panels), 4)
    down = -(-len(panels) // across)
    figure, axes = plt.subplots(down, across, figsize=(3.4 * across, 2.6 * down), squeeze=False, sharey=True)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (name, grid) in zip(axes.flat, panels.items(), strict=False):
        top = max(1, len(grids)) if name == "holders" else 1
        extent = (0.5, size[1] + 0.5, -0.5, size[0] - 0.5)
        picture = axis.imshow(
            grid, aspect="auto", origin="lower", vmin=0, vmax=top, cmap="viridis", extent=extent
        )
        axis.set(title=name, xlabel="round", ylabel="block")
        if name == "holders":
            figure.colorbar(picture, ax=axis)
    return save_figure(figure, folder, "allocations")


def time_to_accuracy(folder: Path) -> Path | None:
    """Figure of the metric of the deployed models over virtual time; None without a virtual clock."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in read_rows(folder) if "virtual_time" in row and metric_of(row)]
    if not rows:
        return None
    metric = metric_of(rows[0]) or METRICS[0]
    rows = [row for row in rows if row[metric] is not None]
    figure, axis = plt.subplots(figsize=(6.4, 4))
    for key, label in ((metric, "mean over clients"), (f"worst_domain_{metric}", "worst domain")):
        axis.plot([r["virtual_time"] for r in rows], [100 * r[key] for r in rows], marker=".", label=label)
    axis.set(xlabel="virtual time, s", ylabel=f"test {metric}, %", xlim=(0, None), ylim=(0, 100))
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", fontsize=8)
    return save_figure(figure, folder, "time_to_accuracy")


FIGURES: Mapping[str, Callable[[Path], Path | None]] = {
    "labels and domains of the clients": partition_map,
    "score by domain": score_by_domain,
    "accuracy over virtual time": time_to_accuracy,
    "blocks by client and round": allocations,
    "aggregation weights": aggregation_weights,
    "variance of the generalization gaps": gap_variance,
    "groups of clients over the rounds": cluster_flow,
    "representations of clients": client_map,
    "representations of images": sample_map,
    LANDSCAPE: landscape,
    FEATURES: feature_map,
}
"""All figures by title. Each is drawn if the run has the table that it needs."""


def draw_figures(folder: Path) -> dict[str, Path]:
    """Draw all figures for which a run has tables; returns the files by title."""
    import matplotlib as mpl

    mpl.use("Agg")
    drawn = {title: figure(folder) for title, figure in FIGURES.items()}
    return {title: path for title, path in drawn.items() if path}
