"""Figure that compares methods: one curve a method, with a band over its seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rayfed.objective import metric_of
from rayfed.record.layout import COMPARE, ROWS
from rayfed.report import style
from rayfed.report.run_tables import RunTables, span

Points = dict[int, list[float]]


def comparison(run: RunTables) -> style.Drawing | None:
    """The method of a run and those of its `compare/<name>`; None where nothing is compared."""
    listed = run.config.get("compare") or []
    names = [listed] if isinstance(listed, str) else listed
    folders = {name: run.path / COMPARE / name for name in names}
    others = {name: [folder] for name, folder in folders.items() if (folder / ROWS).exists()}
    if not others:
        return None
    return compare_runs({run.config["algorithm"]: [run.path], **others})


@style.in_style
def compare_runs(methods: Mapping[str, Sequence[Path]]) -> style.Drawing | None:
    """Score of several methods over the rounds: mean over clients, and the worst domain.

    Args:
        methods: Run folders by method, one folder a seed. A curve is the mean over seeds, its band goes from
            the lowest to the highest seed. Methods keep their colours in this order.

    Returns:
        None where no run has a score.
    """
    runs = {name: [RunTables(folder) for folder in folders] for name, folders in methods.items()}
    every = [row for of in runs.values() for run in of for row in run.rounds]
    metric = next((found for row in every if (found := metric_of(row))), None)
    numbers = [row["round"] for row in every if metric and row.get(metric) is not None]
    if metric is None or not numbers:
        return None
    panels = {metric: "mean over clients", f"worst_domain_{metric}": "worst domain"}
    figure, axes = style.canvas(1, len(panels), (2.0 + 3.4 * len(panels), 3.4), sharey=True)
    known = style.looks(runs)
    for axis, (key, title) in zip(axes[0], panels.items(), strict=True):
        for name, of in runs.items():
            points = _points(of, key)
            if len(points) == 1 and len(set(numbers)) > 1:  # a method that does not train
                axis.axhline(next(iter(points.values()))[0], color=known[name].colour, linestyle="--")
            elif points:
                look = known[name]
                means = [sum(v) / len(v) for v in points.values()]
                axis.plot(list(points), means, look.line, color=look.colour, marker=look.marker)
                ends = ([min(v) for v in points.values()], [max(v) for v in points.values()])
                axis.fill_between(list(points), *ends, color=look.colour, alpha=0.15, linewidth=0)
        style.rounds_axis(axis, min(numbers), max(numbers))
        style.percent_axis(axis, f"test {metric}")
        axis.set_title(title)
    seeds = max(len(of) for of in runs.values())
    what = f"Test {metric} of {len(runs)} methods" + (f"; bands: {seeds} seeds" if seeds > 1 else "")
    first = next(run for of in runs.values() for run in of)
    data = f"{first.config['data']['name']}, " if first.config else ""
    style.heading(figure, what, data + span(numbers))
    style.legend(figure, [style.line_of(look, name) for name, look in known.items()])
    return style.Drawing("comparison", figure)


def _points(runs: Sequence[RunTables], key: str) -> Points:
    """Percentages of all seeds by round, for the rounds that every seed has."""
    of_seed = [{r["round"]: 100 * r[key] for r in run.rounds if r.get(key) is not None} for run in runs]
    common = set.intersection(*map(set, of_seed)) if of_seed else set()
    return {number: [seed[number] for seed in of_seed] for number in sorted(common)}
