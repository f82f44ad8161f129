"""Variance of the generalization gaps over the rounds, under the weights of different servers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rayfed.record.readers import read_table
from rayfed.report import style
from rayfed.report.run_tables import RunTables, span

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
    """Sum over pairs of squared differences: 2 M times the sum of squared deviations of the M gaps."""
    g = np.asarray(gaps, dtype=np.float64)
    return 2 * len(g) * float(((g - g.mean()) ** 2).sum())


@style.in_style
def gap_variance(run: RunTables) -> style.Drawing | None:
    """FFT-GP's Figure 6: the curve of the method itself is bold, the others are those it is compared with.

    A run of FAA has the curves of its own and of FedAvg's weights only with server.compare=true; without it,
    the title says so.
    """
    curves = gap_variances(run.path)
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
