"""Variance of the generalization gaps over the rounds, under the weights of different servers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rayfed.record.readers import read_table
from rayfed.report.group_figures import save_figure

LABELS = {
    "gap_fedavg": "FedAvg's weights",
    "gap": "weights of the round before",
    "gap_ga": "GA: one step",
    "gap_faa": "FAA",
}
"""Weights under which the gaps in the table `gaps` were measured, by the name of the model there."""

Curves = dict[str, list[tuple[int, float]]]


def gap_variances(folder: Path) -> Curves:
    """Variance of the clients' gaps by the weights of the mean model: (round, variance), ascending.

    The variance is the sum over pairs of clients of squared differences (FFT-GP, Eq. 6), from the table
    `gaps`. All values of a round are computed from the same updates. Rounds in which a gap is not finite are
    left out; without the table there are no curves.
    """
    values: dict[str, dict[int, list[float]]] = {name: {} for name in LABELS}
    for row in read_table(folder, "gaps"):
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
    g = np.asarray(gaps, dtype=np.float64)
    return float(((g[:, None] - g[None]) ** 2).sum())


def gap_variance(folder: Path) -> Path | None:
    """FFT-GP's Figure 6; it has all curves if the run has server.compare=true."""
    curves = gap_variances(folder)
    if not curves:
        return None
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axis = plt.subplots(figsize=(6.4, 4))
    for name, points in curves.items():
        axis.plot(*zip(*points, strict=True), "-", marker=".", label=LABELS.get(name, name))
    if all(variance > 0 for points in curves.values() for _, variance in points):
        axis.set_yscale("log")
    axis.set(xlabel="round", ylabel="variance of the generalization gaps, sum over pairs")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)
    axis.legend(loc="upper right", fontsize=8)
    return save_figure(figure, folder, "gap_variance")
