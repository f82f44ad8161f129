"""Figures of the scores: by domain over the rounds, by client, and over traffic and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rayfed.objective import METRICS, metric_of
from rayfed.report import style
from rayfed.report.run_tables import RunTables, span

HELD_OUT = "report_held_out"
BY_DOMAIN = ("report_domains", HELD_OUT)
BY_CLIENT = "report_clients"
MOST_CURVES = 15
"""Largest number of domains that get a colour each; more are drawn in grey, with their mean."""
MOST_NAMES = 30
"""Largest number of clients whose names are shown."""

Rows = Sequence[Mapping[str, Any]]
Curve = list[tuple[int, float]]


def _scores(run: RunTables, *exchanges: str) -> Rows:
    """Rows of these exchanges with a finite value."""
    return [r for r in run.rows("clients") if r["exchange"] in exchanges and r["value"] is not None]


def _metric(rows: Rows) -> str | None:
    return next((row["metric"] for row in rows if row["metric"] in METRICS), None)


@style.in_style
def score_by_domain(run: RunTables) -> style.Drawing | None:
    """Metric and loss of every domain over the rounds, one row of panels a model.

    A band shows the smallest and the largest score of the clients of a domain, where these differ. None where
    no domain was scored.
    """
    rows = _scores(run, *BY_DOMAIN)
    metric = _metric(rows)
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
                style.percent_axis(axis, f"test {metric}")
    what = f"Test {metric} and loss by domain" if len(names) > 1 else f"Test {metric} by domain"
    what += "; bands: from the lowest to the highest client" if banded else ""
    style.heading(figure, *run.title(what, span(numbers)))
    style.legend(figure, _entries(run, rows))
    return style.Drawing(metric, figure)


def _entries(run: RunTables, rows: Rows) -> list[Any]:
    """Legend of the domains in these rows, in the order of the data set; held-out ones are dashed."""
    held_out = {row["client"] for row in rows if row["exchange"] == HELD_OUT}
    found = _in_order(run, rows)
    if len(found) > MOST_CURVES:
        mean = style.Look(style.PALETTE[0], "o", "-")
        return [
            style.line_of(mean, "mean over domains"),
            style.line_of(style.UNKNOWN, f"each of {len(found)} domains", marker=False),
        ]
    return [
        style.line_of(run.look(d), d + (" (held out)" if d in held_out else ""), d in held_out) for d in found
    ]


def _in_order(run: RunTables, rows: Rows) -> list[str]:
    found = dict.fromkeys(row["client"] for row in rows)
    return [d for d in run.domains if d in found] + [d for d in found if d not in run.domains]


def _curves(run: RunTables, axis: Any, model: str, metric: str, rows: Rows) -> bool:
    """Draw one panel; returns whether a band was drawn."""
    scale = 1 if metric == "loss" else 100
    curves: dict[tuple[str, bool], Curve] = {}
    for row in rows:
        if (row["model"], row["metric"]) == (model, metric):
            key = (row["client"], row["exchange"] == HELD_OUT)
            curves.setdefault(key, []).append((row["round"], scale * row["value"]))
    if len(curves) > MOST_CURVES:
        _mean_of_many(axis, [points for (_, held_out), points in curves.items() if not held_out])
        return False
    banded = False
    for (domain, held_out), points in curves.items():
        look = run.look(domain)
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


def _extremes(run: RunTables, model: str, metric: str, domain: str) -> list[tuple[int, float, float]]:
    """Round, lowest and highest score of the clients of a domain; empty where they never differ."""
    values: dict[int, list[float]] = {}
    for row in _scores(run, BY_CLIENT):
        if (row["model"], row["metric"], run.owners.get(row["client"])) == (model, metric, domain):
            values.setdefault(row["round"], []).append(row["value"])
    band = [(number, min(v), max(v)) for number, v in sorted(values.items())]
    return band if any(high > low for _, low, high in band) else []


@style.in_style
def score_by_client(run: RunTables) -> style.Drawing | None:
    """Metric of every client after the last evaluated round, in ascending order; one panel a model."""
    rows = _scores(run, BY_CLIENT)
    metric = _metric(rows)
    if metric is None:
        return None
    last = max(row["round"] for row in rows)
    now = [row for row in rows if row["round"] == last and row["metric"] == metric]
    models = list(dict.fromkeys(row["model"] for row in now))
    figure, axes = style.canvas(1, len(models), (2.4 + 3.6 * len(models), 3.4), sharey=True)
    for axis, model in zip(axes[0], models, strict=True):
        own = sorted((row for row in now if row["model"] == model), key=lambda row: row["value"])
        values = [100 * row["value"] for row in own]
        colours = [run.look(run.owners.get(row["client"], "")).colour for row in own]
        axis.bar(range(1, len(own) + 1), values, color=colours, width=0.8)
        mean = sum(values) / len(values)
        axis.axhline(mean, color="black", linewidth=1, linestyle="--")
        style.percent_axis(axis, f"test {metric}")
        title = f"{model} model" + ("s" if model == "personal" else "")
        axis.set(title=f"{title}: mean over clients {mean:.1f} %", xlim=(0.4, len(own) + 0.6))
        if len(own) <= MOST_NAMES:
            names = [row["client"] for row in own]
            axis.set_xticks(range(1, len(own) + 1), names, rotation=90, fontsize=style.FONT - 2)
        else:
            style.whole_numbers(axis.xaxis)
            axis.set_xlabel("clients, from the lowest to the highest score")
    style.heading(figure, *run.title(f"Test {metric} of every client", f"round {last}"))
    known = dict.fromkeys(run.owners.get(row["client"], "") for row in now)
    style.legend(figure, [style.point_of(look, d) for d, look in run.domains.items() if d in known])
    return style.Drawing("clients", figure)


UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


@style.in_style
def score_by_cost(run: RunTables) -> style.Drawing | None:
    """Metric of the deployed models over the traffic and over the seconds of all rounds so far."""
    return _over(run, _costs(run.rounds), "cost", "traffic and time")


@style.in_style
def time_to_accuracy(run: RunTables) -> style.Drawing | None:
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
        totals["bytes"] += row.get("bytes_up", 0) + row.get("bytes_down", 0)
        totals["time"] += row.get("seconds", 0.0)
        for name, total in totals.items():
            sums[name].append(total)
    found = {}
    if totals["bytes"]:
        unit, word = next(pair for pair in UNITS if totals["bytes"] >= pair[0])
        found[f"traffic up and down, {word}"] = [value / unit for value in sums["bytes"]]
    if totals["time"]:
        found["time on this machine, s"] = sums["time"]
    return found


def _over(run: RunTables, costs: Mapping[str, list[float]], name: str, what: str) -> style.Drawing | None:
    metric = next((found for row in run.rounds if (found := metric_of(row))), None)
    worst = f"worst_domain_{metric}"
    shown = [i for i, row in enumerate(run.rounds) if metric and row.get(metric) is not None]
    if metric is None or not shown or not costs:
        return None
    figure, axes = style.canvas(1, len(costs), (1.6 + 3.4 * len(costs), 3.2), sharey=True)
    curves = style.looks((metric, worst))
    labels = {metric: "mean over clients", worst: "worst domain"}
    for axis, (label, values) in zip(axes[0], costs.items(), strict=True):
        for key, look in curves.items():
            points = [
                (values[i], 100 * run.rounds[i][key]) for i in shown if run.rounds[i].get(key) is not None
            ]
            if points:
                axis.plot(*zip(*points, strict=True), look.line, color=look.colour, marker=look.marker)
        style.percent_axis(axis, f"test {metric}")
        axis.set(xlabel=label, xlim=(0, 1.03 * max(values) or 1.0))  # all 0 where nobody was reached
    numbers = [run.rounds[i]["round"] for i in shown]
    style.heading(figure, *run.title(f"Test {metric} over {what}", span(numbers)))
    style.legend(figure, [style.line_of(look, labels[key]) for key, look in curves.items()])
    return style.Drawing(name, figure)
