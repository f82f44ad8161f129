"""Figures of the protocol leave_one_out: the scores of all folds, and their mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayfed.objective import metric_of
from rayfed.record.layout import COMPARE
from rayfed.report import style
from rayfed.report.leave_one_out import selected
from rayfed.report.run_tables import RunTables, span

PANELS = {"held_out_": "the held-out domain", "": "the clients' own domains"}
"""Prefix of the columns of a round's row, with the title of the panel."""

Folds = Mapping[str, RunTables]


def _folds(run: RunTables) -> Folds:
    """The folds with a scored round, by held-out domain, in the order of the data set."""
    if run.config.get("protocol") != "leave_one_out":
        return {}
    tables = [RunTables(path) for path in sorted(run.path.iterdir()) if (path / "partition.parquet").exists()]
    found = {fold.path.name: fold for fold in tables if any(metric_of(row, "val_") for row in fold.rounds)}
    order = list(next(iter(found.values())).domains) if found else []
    return {name: found[name] for name in sorted(found, key=order.index)}


@style.in_style
def score_by_fold(run: RunTables) -> style.Drawing | None:
    """Bars: score of every fold in its selected round and the mean, on the held-out and on the own domains.

    None where the run has no fold with a scored round.
    """
    folds = _folds(run)
    if not folds:
        return None
    methods = _methods(run, folds)
    known = style.looks(methods)
    figure, axes = style.canvas(len(PANELS), 1, (3.4 + 0.5 * len(methods) * (1 + len(folds)), 5.0))
    labels = [*folds, "mean"]
    width = 0.8 / len(methods)
    metric = _shared_metric(folds)
    for axis, (prefix, title) in zip(axes[:, 0], PANELS.items(), strict=True):
        for place, (name, of) in enumerate(methods.items()):
            values = _selected(of, prefix + metric)
            values.append(sum(values) / len(values))
            at = [i + (place - (len(methods) - 1) / 2) * width for i in range(len(labels))]
            axis.bar(at, values, width=width, color=known[name].colour)
        axis.axvline(len(folds) - 0.5, color="black", linewidth=0.8, linestyle=":")
        style.percent_axis(axis, f"test {metric}")
        axis.set_title(title)
        axis.set_xticks(range(len(labels)), labels)
    axes[-1, 0].set_xlabel("domain that is held out")
    style.heading(figure, f"Test {metric} with each domain held out", *_about(run))
    style.legend(figure, [style.point_of(look, name) for name, look in known.items()])
    return style.Drawing("folds", figure)


@style.in_style
def score_by_fold_and_round(run: RunTables) -> style.Drawing | None:
    """Score on the held-out domain over the rounds, a curve for each fold, and their mean in black."""
    folds = _folds(run)
    if not folds:
        return None
    metric = _shared_metric(folds)
    key = f"held_out_{metric}"
    curves = {
        name: {row["round"]: 100 * row[key] for row in fold.rounds if row.get(key) is not None}
        for name, fold in folds.items()
    }
    numbers = sorted({number for points in curves.values() for number in points})
    figure, axes = style.canvas(1, 1, (6.4, 3.4))
    axis = axes[0, 0]
    known = next(iter(folds.values())).domains
    for name, points in curves.items():
        look = known[name]
        axis.plot(list(points), list(points.values()), look.line, color=look.colour, marker=look.marker)
    common = [number for number in numbers if all(number in points for points in curves.values())]
    means = [sum(points[number] for points in curves.values()) / len(curves) for number in common]
    (mean,) = axis.plot(common, means, "-", color="black", linewidth=2.4, label="mean")
    style.rounds_axis(axis, min(numbers), max(numbers))
    style.percent_axis(axis, f"test {metric} of the held-out domain")
    about = _about(run)
    style.heading(
        figure,
        f"Test {metric} of the held-out domain, {run.config['algorithm']}",
        f"{about[0]}, {span(numbers)}",
    )
    style.legend(figure, [*(style.line_of(known[name], name) for name in curves), mean])
    return style.Drawing("folds_by_round", figure)


def _about(run: RunTables) -> Sequence[str]:
    return (f"{run.config['data']['name']}, seed {run.config['seed']}",)


def _shared_metric(folds: Folds) -> str:
    rows: list[dict[str, Any]] = [row for fold in folds.values() for row in fold.rounds]
    return next(metric for row in rows if (metric := metric_of(row, "val_")))


def _methods(run: RunTables, folds: Folds) -> dict[str, list[RunTables]]:
    """The runs of every method in the order of the folds; the main method is first."""
    listed = run.config.get("compare") or []
    others = [listed] if isinstance(listed, str) else listed
    own = run.config["algorithm"]
    places: dict[str, list[Path]] = {own: [fold.path for fold in folds.values()]}
    places |= {
        name: [fold.path / COMPARE / name for fold in folds.values()] for name in others if name != own
    }
    return {
        name: [RunTables(path) for path in paths]
        for name, paths in places.items()
        if all((path / "config.yaml").exists() for path in paths)
    }


def _selected(runs: Sequence[RunTables], key: str) -> list[float]:
    """Percentages in the selected rounds; 0 where a run has no finite score."""
    return [100 * (selected(run.rounds).get(key) or 0.0) for run in runs]
