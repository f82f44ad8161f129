"""Sections about several runs with figures: curves with seeds as bands, domains, fairness and cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean

import numpy as np

from rayfed.report.page.charts import ROUND, Axis, Series, curves, share_axis
from rayfed.report.page.cost import bytes_of, seconds_of
from rayfed.report.page.fairness import cumulative, spread_table
from rayfed.report.page.find import Member
from rayfed.report.page.heat import Cells, heat_map
from rayfed.report.page.overview import UNSEEN, Groups, domains_of, grouped, level
from rayfed.report.page.parts import Cell, Column, Grid, Part, Section
from rayfed.types import Row

HELD_OUT = "held_out_{}"
"""Column of a round with the score of the held-out domains, `{}` being the metric."""
MOST_DOMAINS = 12
"""Largest number of domains that have a column each."""
MOST_CURVES = 10
"""Largest number of groups of runs with a curve each; of more, those with the highest scores have one."""

BANDS = "Mean over seeds; bands: from the lowest to the highest seed."
CURVES: Mapping[str, tuple[str, Axis]] = {
    "{}_domain": ("Score, mean over domains", share_axis("score")),
    HELD_OUT: ("Score of the held-out domain", share_axis("score")),
    "worst_domain_{}": ("Score of the worst domain", share_axis("score")),
    "sigma_type": ("Deviation over domains", Axis(name="sigma_type", kind="points", low=0.0)),
    "loss": ("Loss, mean over clients", Axis(name="loss")),
}
"""Columns of a round that have a chart: its title and its vertical axis."""


def over_rounds(members: Sequence[Member]) -> Section:
    """Curves of every group of runs, mean over seeds with a band from the lowest to the highest seed."""
    groups, words = _best(grouped(members))
    parts: list[Part] = []
    for key, (title, axis) in CURVES.items():
        series = [_of_group(name, group, key) for name, group in groups.items()]
        if not any(one.x for one in series):
            continue
        caption = BANDS if _several_seeds(groups) else ""
        parts.append(curves(title, series, ROUND, axis, f"{caption} {words}".strip()))
    return Section("Curves", parts)


def _several_seeds(groups: Groups) -> bool:
    return any(len(group) > 1 for group in groups.values())


def _best(groups: Groups) -> tuple[Groups, str]:
    """At most MOST_CURVES groups, those with the highest scores, and a sentence about the others."""
    if len(groups) <= MOST_CURVES:
        return groups, ""
    kept = set(sorted(groups, key=lambda name: level(groups[name]), reverse=True)[:MOST_CURVES])
    shown = {name: group for name, group in groups.items() if name in kept}
    return shown, f"Shown are the {MOST_CURVES} with the highest scores of {len(groups)}."


def _of_group(name: str, group: Sequence[Member], key: str) -> Series:
    values: dict[int, list[float]] = {}
    for member in group:
        full = ("" if key == HELD_OUT else member.run.prefix) + key.format(member.run.metric)
        for row in member.run.rounds:
            if isinstance(row.get(full), int | float):
                values.setdefault(row["round"], []).append(float(row[full]))
    numbers = sorted(values)
    edges = [(min(values[n]), max(values[n])) for n in numbers]
    several = len(group) > 1
    return Series(
        label=name,
        x=numbers,
        y=[fmean(values[n]) for n in numbers],
        low=[low for low, _ in edges] if several else None,
        high=[high for _, high in edges] if several else None,
    )


def by_domain(members: Sequence[Member]) -> Section:
    """Scores of all groups of runs on every domain, mean over seeds, as a table and as a heat map."""
    groups = grouped(members)
    found: dict[str, dict[str, list[float]]] = {}
    for name, group in groups.items():
        for domain, score, _ in (each for member in group for each in domains_of(member)):
            bare = domain.removesuffix(UNSEEN)
            found.setdefault(name, {}).setdefault(bare, []).append(score)
    names = list(dict.fromkeys(domain for one in found.values() for domain in one))
    if not names:
        return Section("Domains", [])
    values = [[fmean(one[d]) if d in one else np.nan for d in names] for one in found.values()]
    cells = Cells(
        values=np.array(values, dtype=float),
        down=list(found),
        across=names,
        row="method",
        column="domain",
        value=Column("score", "percent"),
    )
    title = "Score of each method on each domain"
    parts: list[Part] = [heat_map(title, cells, "Mean over seeds." if _several_seeds(groups) else "")]
    if len(names) <= MOST_DOMAINS:
        columns = [Column("method"), *(Column(name, "percent") for name in names)]
        rows: list[list[Cell]] = [[name, *row] for name, row in zip(found, values, strict=True)]
        parts.insert(0, Grid(title="Score by domain", columns=columns, rows=rows))
    return Section("Domains", parts)


def fairness(members: Sequence[Member]) -> Section:
    """Cumulative curves and spread of the clients' scores, all seeds together."""
    groups, words = _best(grouped(members))
    scores = {}
    for name, group in groups.items():
        own = [member.run.of_clients(member.run.deployed) for member in group]
        if sum(map(len, own)):
            scores[name] = np.concatenate(own)
    if not scores:
        return Section("Fairness", [])
    metric = members[0].run.metric
    table = spread_table(scores, metric, "method")
    return Section("Fairness", [cumulative(scores, metric, f"The clients of all seeds. {words}"), table])


def cost(members: Sequence[Member]) -> Section:
    """Score over bytes and over time, of one seed of each group."""
    groups, words = _best(grouped(members))
    parts: list[Part] = []
    for title, axis, of in (
        ("Score over the bytes sent", Axis(name="sent in both directions", kind="bytes", low=0.0), bytes_of),
        ("Score over time", Axis(name="time", kind="seconds", low=0.0), seconds_of),
    ):
        series = [_over(name, group[0], of) for name, group in groups.items()]
        if any(one.x for one in series):
            caption = "The first seed of each." if _several_seeds(groups) else ""
            parts.append(curves(title, series, axis, share_axis("score"), f"{caption} {words}".strip()))
    return Section("Cost", parts)


def _over(name: str, member: Member, of: Callable[[Row], float]) -> Series:
    key = f"{member.run.prefix}{member.run.metric}_domain"
    total = accumulate(of(row) for row in member.run.rounds)
    points = [
        (t, row[key]) for t, row in zip(total, member.run.rounds, strict=True) if row.get(key) is not None
    ]
    return Series(label=name, x=[t for t, _ in points], y=[v for _, v in points])
