"""Figures of a run, drawn from its tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rayfed.columns import (
    BYTES_DOWN,
    BYTES_UP,
    DEPLOYED,
    HELD_OUT,
    MEAN,
    SECONDS,
    VALIDATED,
    WORST_DOMAIN,
    level_words,
    metric_of,
    scale_of,
    share_of,
)
from rayfed.record.readers import ROWS
from rayfed.record.recorded_run import RecordedRun
from rayfed.report import style
from rayfed.report.feature_map import TITLE as FEATURES
from rayfed.report.feature_map import feature_map
from rayfed.report.final_table import in_words, span, unit_of
from rayfed.report.landscape import TITLE as LANDSCAPE
from rayfed.report.landscape import landscape
from rayfed.report.method_figures import (
    aggregation_weights,
    allocations,
    client_map,
    cluster_flow,
    gap_variance,
    partition_map,
    sample_map,
)
from rayfed.report.method_runs import MethodRuns, StudyRuns
from rayfed.report.slopes import TITLE as SLOPES
from rayfed.report.slopes import gap_slopes
from rayfed.report.style import Drawing
from rayfed.terminal.console import stage

UNOWNED = "report_held_out"
BY_DOMAIN = ("report_domains", UNOWNED)
BY_CLIENT = "report_clients"
MOST_CURVES = 15
"""Largest number of domains that get a colour each; more are drawn in grey, with their mean."""
MOST_NAMES = 30
"""Largest number of clients whose names are shown."""

Rows = Sequence[Mapping[str, Any]]
Curve = list[tuple[int, float]]


def _scores(run: RecordedRun, *exchanges: str) -> Rows:
    """Rows of these exchanges with a finite value."""
    return [r for r in run.rows("clients") if r["exchange"] in exchanges and r["value"] is not None]


def _metric(run: RecordedRun, rows: Rows) -> str | None:
    """The metric of a run; None: no row is one of it."""
    return run.metric if any(row["metric"] == run.metric for row in rows) else None


@style.in_style
def score_by_domain(run: RecordedRun) -> style.Drawing | None:
    """Metric and loss of every domain over the rounds, one row of panels a model.

    A band shows the smallest and the largest score of the clients of a domain, where these differ. None where
    no domain was scored.
    """
    rows = _scores(run, *BY_DOMAIN)
    metric = _metric(run, rows)
    if metric is None:
        return None
    models = list(dict.fromkeys(row["model"] for row in rows))
    names = [metric] + ["loss"] * any(row["metric"] == "loss" for row in rows)
    size = (1.4 + 3.4 * len(names), 0.8 + 2.6 * len(models))
    figure, axes = style.canvas(len(models), len(names), size)
    numbers = [row["round"] for row in rows]
    banded = False
    for row, model in zip(axes, models, strict=True):
        for axis, name in zip(row, names, strict=True):
            banded |= _curves(run, axis, model, name, rows)
            style.rounds_axis(axis, min(numbers), max(numbers))
            axis.set_title(f"{model} model" + ("s" if model == "personal" else ""))
            if name == "loss":
                axis.set_ylabel("test loss")
                axis.grid(axis="y", alpha=0.3)
            else:
                style.score_axis(axis, f"test {metric}", metric)
    what = f"Test {metric} and loss by domain" if len(names) > 1 else f"Test {metric} by domain"
    what += "; bands: from the lowest to the highest client" if banded else ""
    style.heading(figure, *run.title(what, span(numbers)))
    style.legend(figure, _entries(run, rows))
    return style.Drawing(metric, figure)


def _entries(run: RecordedRun, rows: Rows) -> list[Any]:
    """Legend of the domains in these rows, in the order of the data set; held-out ones are dashed."""
    held_out = {row["client"] for row in rows if row["exchange"] == UNOWNED}
    clients, known = run.order([row["client"] for row in rows]), _looks(run)
    if len(clients) > MOST_CURVES:
        mean = style.Look(style.PALETTE[0], "o", "-")
        return [
            style.line_of(mean, "mean over domains"),
            style.line_of(style.UNKNOWN, f"each of {len(clients)} domains", marker=False),
        ]
    return [
        style.line_of(known[d], d + (" (held out)" if d in held_out else ""), d in held_out) for d in clients
    ]


def _looks(run: RecordedRun) -> Mapping[str, style.Look]:
    """The look of every domain; of one that the partition does not have, that of what is not known."""
    return defaultdict(lambda: style.UNKNOWN, style.looks(run.domains))


def _curves(run: RecordedRun, axis: Any, model: str, metric: str, rows: Rows) -> bool:
    """Draw one panel; returns whether a band was drawn."""
    scale, known = 1 if metric == "loss" else 100, _looks(run)
    curves: dict[tuple[str, bool], Curve] = {}
    for row in rows:
        if (row["model"], row["metric"]) == (model, metric):
            key = (row["client"], row["exchange"] == UNOWNED)
            curves.setdefault(key, []).append((row["round"], scale * row["value"]))
    if len(curves) > MOST_CURVES:
        _mean_of_many(axis, [points for (_, held_out), points in curves.items() if not held_out])
        return False
    banded = False
    for (domain, held_out), points in curves.items():
        look = known[domain]
        line = "--" if held_out else look.line
        axis.plot(*zip(*points, strict=True), line, color=look.colour, marker=look.marker, label=domain)
        if band := [] if held_out else _extremes(run, model, metric, domain):
            x, low, high = zip(*band, strict=True)
            ends = ([scale * v for v in low], [scale * v for v in high])
            axis.fill_between(x, *ends, color=look.colour, alpha=0.15, linewidth=0)
            banded = True
    return banded


def _mean_of_many(axis: Any, curves: Sequence[Curve]) -> None:
    values: dict[int, list[float]] = {}
    for points in curves:
        axis.plot(*zip(*points, strict=True), "-", color=style.GREY, alpha=0.3, linewidth=0.8)
        for number, value in points:
            values.setdefault(number, []).append(value)
    means = [(number, sum(v) / len(v)) for number, v in sorted(values.items())]
    axis.plot(*zip(*means, strict=True), "-", marker="o", color=style.PALETTE[0])


def _extremes(run: RecordedRun, model: str, metric: str, domain: str) -> list[tuple[int, float, float]]:
    """Round, lowest and highest score of the clients of a domain; empty where they never differ."""
    values: dict[int, list[float]] = {}
    for row in _scores(run, BY_CLIENT):
        if (row["model"], row["metric"], run.owners.get(row["client"])) == (model, metric, domain):
            values.setdefault(row["round"], []).append(row["value"])
    band = [(number, min(v), max(v)) for number, v in sorted(values.items())]
    return band if any(high > low for _, low, high in band) else []


@style.in_style
def score_by_client(run: RecordedRun) -> style.Drawing | None:
    """Metric of every client after the last evaluated round, in ascending order; one panel a model."""
    rows = _scores(run, BY_CLIENT)
    metric = _metric(run, rows)
    if metric is None:
        return None
    last = max(row["round"] for row in rows)
    now = [row for row in rows if row["round"] == last and row["metric"] == metric]
    models, known = list(dict.fromkeys(row["model"] for row in now)), _looks(run)
    figure, axes = style.canvas(1, len(models), (2.4 + 3.6 * len(models), 3.4), sharey=True)
    for axis, model in zip(axes[0], models, strict=True):
        own = sorted((row for row in now if row["model"] == model), key=lambda row: row["value"])
        values = [share_of(metric) * row["value"] for row in own]
        colours = [known[run.owners.get(row["client"], "")].colour for row in own]
        axis.bar(range(1, len(own) + 1), values, color=colours, width=0.8)
        mean = sum(values) / len(values)
        axis.axhline(mean, color="black", linewidth=1, linestyle="--")
        style.score_axis(axis, f"test {metric}", metric)
        title = f"{model} model" + ("s" if model == "personal" else "")
        axis.set(
            title=f"{title}: mean over clients {in_words(mean, metric)}{unit_of(metric)}",
            xlim=(0.4, len(own) + 0.6),
        )
        if len(own) <= MOST_NAMES:
            names = [row["client"] for row in own]
            axis.set_xticks(range(1, len(own) + 1), names, rotation=90, fontsize=style.FONT - 2)
        else:
            style.whole_numbers(axis.xaxis)
            axis.set_xlabel("clients, from the lowest to the highest score")
    style.heading(figure, *run.title(f"Test {metric} of every client", f"round {last}"))
    owners = {run.owners.get(row["client"], "") for row in now}
    style.legend(figure, [style.point_of(known[d], d) for d in run.domains if d in owners])
    return style.Drawing("clients", figure)


UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


@style.in_style
def score_by_cost(run: RecordedRun) -> style.Drawing | None:
    """Metric of the deployed models over the traffic and over the seconds of all rounds so far."""
    return _over(run, _costs(run.rounds), "cost", "traffic and time")


@style.in_style
def time_to_accuracy(run: RecordedRun) -> style.Drawing | None:
    """Metric of the deployed models over virtual time; None without a virtual clock."""
    if not any("virtual_time" in row for row in run.rounds):
        return None
    times = [row.get("virtual_time", 0.0) for row in run.rounds]
    return _over(run, {"virtual time, s": times}, "time_to_accuracy", "virtual time")


def _costs(rounds: Rows) -> dict[str, list[float]]:
    """Traffic and seconds up to each round, by the label of their axis; without what is zero throughout."""
    totals = {"bytes": 0.0, "time": 0.0}
    sums: dict[str, list[float]] = {name: [] for name in totals}
    for row in rounds:
        totals["bytes"] += BYTES_UP.total([row]) + BYTES_DOWN.total([row])
        totals["time"] += SECONDS.total([row])
        for name, total in totals.items():
            sums[name].append(total)
    costs = {}
    if totals["bytes"]:
        unit, unit_name = next(pair for pair in UNITS if totals["bytes"] >= pair[0])
        costs[f"traffic up and down, {unit_name}"] = [value / unit for value in sums["bytes"]]
    if totals["time"]:
        costs["time on this machine, s"] = sums["time"]
    return costs


def _over(run: RecordedRun, costs: Mapping[str, list[float]], name: str, what: str) -> style.Drawing | None:
    metric = next((found for row in run.rounds if (found := metric_of(row))), None)
    worst = WORST_DOMAIN.name(metric or "")
    shown = [i for i, row in enumerate(run.rounds) if metric and row.get(metric) is not None]
    if metric is None or not shown or not costs:
        return None
    figure, axes = style.canvas(1, len(costs), (1.6 + 3.4 * len(costs), 3.2), sharey=True)
    curves = style.looks((metric, worst))
    labels = {metric: level_words(metric), worst: WORST_DOMAIN.words}
    for axis, (label, values) in zip(axes[0], costs.items(), strict=True):
        for key, look in curves.items():
            points = [
                (values[i], share_of(metric) * run.rounds[i][key])
                for i in shown
                if run.rounds[i].get(key) is not None
            ]
            if points:
                axis.plot(*zip(*points, strict=True), look.line, color=look.colour, marker=look.marker)
        style.score_axis(axis, f"test {metric}", metric)
        axis.set(xlabel=label, xlim=(0, 1.03 * max(values) or 1.0))  # all 0 where nobody was reached
    numbers = [run.rounds[i]["round"] for i in shown]
    style.heading(figure, *run.title(f"Test {metric} over {what}", span(numbers)))
    style.legend(figure, [style.line_of(look, labels[key]) for key, look in curves.items()])
    return style.Drawing(name, figure)


Points = dict[int, list[float]]


def comparison(runs: MethodRuns) -> style.Drawing | None:
    """The scores of compared methods; None where fewer than two of them have a round."""
    scored = {method: [path] for _, method, path in runs.each() if (path / ROWS).exists()}
    return compare_runs(scored) if len(scored) > 1 else None


@style.in_style
def compare_runs(methods: Mapping[str, Sequence[Path]]) -> style.Drawing | None:
    """Score of several methods over the rounds: mean over clients, and the worst domain.

    Args:
        methods: Run folders by method, one folder a seed. A curve is the mean over seeds, its band goes from
            the lowest to the highest seed. Methods keep their colours in this order.

    Returns:
        None where no run has a score.
    """
    runs = {name: [RecordedRun(folder) for folder in folders] for name, folders in methods.items()}
    every = [row for of in runs.values() for run in of for row in run.rounds]
    metric = next((found for row in every if (found := metric_of(row))), None)
    numbers = [row["round"] for row in every if metric and row.get(metric) is not None]
    if metric is None or not numbers:
        return None
    panels = {metric: level_words(metric), WORST_DOMAIN.name(metric): WORST_DOMAIN.words}
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
        style.score_axis(axis, f"test {metric}", metric)
        axis.set_title(title)
    seeds = max(len(of) for of in runs.values())
    what = f"Test {metric} of {len(runs)} methods" + (f"; bands: {seeds} seeds" if seeds > 1 else "")
    first = next(run for of in runs.values() for run in of)
    data = f"{first.config['data']['name']}, " if first.config else ""
    style.heading(figure, what, data + span(numbers))
    style.legend(figure, [style.line_of(look, name) for name, look in known.items()])
    return style.Drawing("comparison", figure)


def _points(runs: Sequence[RecordedRun], key: str) -> Points:
    """Percentages of all seeds by round, for the rounds that every seed has."""
    of_seed = [
        {r["round"]: scale_of(key) * r[key] for r in run.rounds if r.get(key) is not None} for run in runs
    ]
    common = set.intersection(*map(set, of_seed)) if of_seed else set()
    return {number: [seed[number] for seed in of_seed] for number in sorted(common)}


PANELS = {HELD_OUT: "the held-out domain", DEPLOYED: "the clients' own domains"}
"""Prefix of the columns of a round's row, with the title of the panel."""

Folds = Mapping[str, RecordedRun]


def _folds(runs: MethodRuns) -> Folds:
    """The folds of the first method with a scored round, by held-out domain, in the order of the data set."""
    first = [(part, run) for part, method, run in runs.recorded("validation") if method == runs.methods[0]]
    folds = {part: run for part, run in first if any(metric_of(row, VALIDATED) for row in run.rounds)}
    order = next(iter(folds.values())).domains if folds else []
    return {name: folds[name] for name in sorted(folds, key=order.index)}


@style.in_style
def score_by_fold(runs: MethodRuns) -> style.Drawing | None:
    """Bars: score of every fold in its selected round and the mean, on the held-out and on the own domains.

    None where no fold has a scored round.
    """
    folds = _folds(runs)
    if not folds:
        return None
    methods = _methods(runs, folds)
    known = style.looks(methods)
    figure, axes = style.canvas(len(PANELS), 1, (3.4 + 0.5 * len(methods) * (1 + len(folds)), 5.0))
    labels = [*folds, "mean"]
    width = 0.8 / len(methods)
    metric = _shared_metric(folds)
    for axis, (prefix, title) in zip(axes[:, 0], PANELS.items(), strict=True):
        for place, (name, of) in enumerate(methods.items()):
            values = _selected_scores(of, prefix + metric)
            values.append(sum(values) / len(values))
            at = [i + (place - (len(methods) - 1) / 2) * width for i in range(len(labels))]
            axis.bar(at, values, width=width, color=known[name].colour)
        axis.axvline(len(folds) - 0.5, color="black", linewidth=0.8, linestyle=":")
        style.score_axis(axis, f"test {metric}", metric)
        axis.set_title(title)
        axis.set_xticks(range(len(labels)), labels)
    axes[-1, 0].set_xlabel("domain that is held out")
    style.heading(figure, f"Test {metric} with each domain held out", *_about(runs))
    style.legend(figure, [style.point_of(look, name) for name, look in known.items()])
    return style.Drawing("folds", figure)


@style.in_style
def score_by_fold_and_round(runs: MethodRuns) -> style.Drawing | None:
    """Score on the held-out domain over the rounds, a curve for each fold, and their mean in black."""
    folds = _folds(runs)
    if not folds:
        return None
    metric = _shared_metric(folds)
    key = MEAN.name(metric, HELD_OUT)
    curves = {
        name: {row["round"]: scale_of(key) * row[key] for row in fold.rounds if row.get(key) is not None}
        for name, fold in folds.items()
    }
    numbers = sorted({number for points in curves.values() for number in points})
    figure, axes = style.canvas(1, 1, (6.4, 3.4))
    axis = axes[0, 0]
    known = _looks(next(iter(folds.values())))
    for name, points in curves.items():
        look = known[name]
        axis.plot(list(points), list(points.values()), look.line, color=look.colour, marker=look.marker)
    common = [number for number in numbers if all(number in points for points in curves.values())]
    means = [sum(points[number] for points in curves.values()) / len(curves) for number in common]
    (mean,) = axis.plot(common, means, "-", color="black", linewidth=2.4, label="mean")
    style.rounds_axis(axis, min(numbers), max(numbers))
    style.score_axis(axis, f"test {metric} of the held-out domain", metric)
    about = _about(runs)
    style.heading(
        figure,
        f"Test {metric} of the held-out domain, {runs.methods[0]}",
        f"{about[0]}, {span(numbers)}",
    )
    style.legend(figure, [*(style.line_of(known[name], name) for name in curves), mean])
    return style.Drawing("folds_by_round", figure)


def _about(runs: MethodRuns) -> Sequence[str]:
    config = runs.config
    return (f"{config['data']['name']}, seed {config['seed']}",)


def _shared_metric(folds: Folds) -> str:
    rows: list[dict[str, Any]] = [row for fold in folds.values() for row in fold.rounds]
    return next(metric for row in rows if (metric := metric_of(row, VALIDATED)))


def _methods(runs: MethodRuns, folds: Folds) -> dict[str, list[RecordedRun]]:
    """The runs of every method that has all folds, in the order of the folds."""
    return {
        method: [RecordedRun(runs.folders[method, fold], "validation") for fold in folds]
        for method in runs.methods
        if all((method, fold) in runs.folders for fold in folds)
    }


def _selected_scores(runs: Sequence[RecordedRun], key: str) -> list[float]:
    """Percentages in the rounds that validation selects; 0 where a run has no finite score."""
    return [scale_of(key) * (run.reported.get(key) or 0.0) for run in runs]


FIGURES: Mapping[str, Callable[[RecordedRun], Drawing | None]] = {
    "labels and domains of the clients": partition_map,
    "score by domain": score_by_domain,
    "score by client": score_by_client,
    "score over traffic and time": score_by_cost,
    "score over virtual time": time_to_accuracy,
    "blocks by client and round": allocations,
    "aggregation weights": aggregation_weights,
    "variance of the generalization gaps": gap_variance,
    "groups of clients over the rounds": cluster_flow,
    "representations of clients": client_map,
    "representations of images": sample_map,
    LANDSCAPE: landscape,
    FEATURES: feature_map,
    SLOPES: gap_slopes,
}
"""All figures by title. Each is drawn if the run has the table that it needs."""


OF_FOLDS: Mapping[str, Callable[[MethodRuns], Drawing | None]] = {
    "score with each domain held out": score_by_fold,
    "score of the held-out domain over the rounds": score_by_fold_and_round,
}
"""Figures of protocol=leave_one_out."""

OF_METHODS: Mapping[str, Callable[[MethodRuns], Drawing | None]] = {"methods that are compared": comparison}
"""Figures of compared methods without a protocol."""


def draw_figures(run: RecordedRun) -> dict[str, Path]:
    """Draw all figures for which a run has tables; returns the files by title."""
    stage("drawing the figures")
    drawn = {title: figure(run) for title, figure in FIGURES.items()}
    return {title: drawing.save(run.path) for title, drawing in drawn.items() if drawing}


def draw_study_figures(folder: Path, study: StudyRuns) -> dict[str, Path]:
    """Draw the figures of all runs of a study with one seed into its folder; returns the files by title."""
    stage("drawing the figures")
    figures = {"": OF_METHODS, "leave_one_out": OF_FOLDS}.get(study.protocol, {})
    runs = study.seeds[0].finished() if study.protocol else study.seeds[0]
    drawn = {title: figure(runs) for title, figure in figures.items()} if runs.folders else {}
    return {title: drawing.save(folder) for title, drawing in drawn.items() if drawing}
