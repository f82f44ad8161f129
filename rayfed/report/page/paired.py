"""Comparisons of methods on what they have in common: the same setting and seed, or the same clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from rayfed.report.page.find import Member
from rayfed.report.page.overview import level
from rayfed.report.page.parts import Cell, Column, Grid

MOST_METHODS = 8
"""Largest number of methods that are all compared with each other; of more, each with the best one."""

MEASURES: Mapping[str, Callable[[Member], float | None]] = {
    "mean over domains": lambda m: m.run.number("{}_domain"),
    "mean over clients": lambda m: m.run.number("{}"),
    "worst domain": lambda m: m.run.number("worst_domain_{}"),
    "held-out domain": lambda m: m.run.held_out_score,
}
"""Scores by which runs are compared, fractions."""


def comparisons(members: Sequence[Member]) -> Grid | None:
    """Differences between methods over runs with the same setting and seed, and over the same clients.

    Where all runs have the same method, its settings are compared over seeds. Settings of which no mean is
    reported, such as base and new classes, are compared one by one. None where there is nothing to compare.
    """
    by_setting = len({member.method for member in members}) == 1
    apart: dict[str, list[Member]] = {}
    for member in members:
        apart.setdefault("" if by_setting or member.averaged else member.setting, []).append(member)
    rows = [row for setting, own in apart.items() for row in _of_setting(setting, own, by_setting)]
    if not rows:
        return None
    columns = [Column("setting"), Column("A"), Column("B"), Column("score"), Column("pairs of")]
    columns += [Column("pairs", "count")]
    columns += [Column("mean of A minus B", "points"), Column("deviation", "points")]
    columns += [Column("A higher", "count"), Column("B higher", "count"), Column("p", "p")]
    caption = (
        "A pair of runs has the same setting and seed; a pair of clients is one client under both methods, "
        "in all such runs. p: two-sided paired t-test. Clients of one run share its seed: their test says "
        "how many clients gain; only the one over runs says whether other seeds would show the same."
    )
    unused = 0 if any(apart) else 1
    columns, rows = columns[unused:], [row[unused:] for row in rows]
    filters = dict.fromkeys((column.name for column in columns if column.kind == "text"), "")
    return Grid(title="Paired comparisons", caption=caption, columns=columns, rows=rows, filters=filters)


def _of_setting(setting: str, members: Sequence[Member], by_setting: bool) -> Iterator[list[Cell]]:
    """Rows that compare the methods of these runs, or with `by_setting` their settings."""
    candidates: dict[str, dict[tuple[str, int], Member]] = {}
    for member in members:
        name, rest = (member.setting, "") if by_setting else (member.method, member.setting)
        candidates.setdefault(name, {})[rest, member.run.seed] = member
    pairs = list(combinations(candidates, 2))
    if len(candidates) > MOST_METHODS:
        best = max(candidates, key=lambda name: level(list(candidates[name].values())))
        pairs = [(best, name) for name in candidates if name != best]
    for a, b in pairs:
        for row in _rows(candidates[a], candidates[b]):
            yield [setting, a, b, *row]


def _rows(
    first: Mapping[tuple[str, int], Member], second: Mapping[tuple[str, int], Member]
) -> Iterator[list[Cell]]:
    shared = [key for key in first if key in second]
    for name, measure in MEASURES.items():
        found = [(measure(first[key]), measure(second[key])) for key in shared]
        differences = [x - y for x, y in found if x is not None and y is not None]
        if differences:
            yield [name, "runs", *statistics(differences)]
    both = [d for key in shared for d in _of_clients(first[key], second[key])]
    if both:
        yield ["score of a client", "clients", *statistics(both)]


def _of_clients(a: Member, b: Member) -> list[float]:
    """Differences of the scores of the clients that two runs share."""
    one, other = (m.run.now("client", m.run.deployed, m.run.metric).dropna() for m in (a, b))
    shared = one.index.intersection(other.index)
    return [float(v) for v in (one[shared] - other[shared])]


def statistics(differences: Sequence[float]) -> list[Cell]:
    """Number, mean, sample standard deviation, how many are positive and negative, and p of a paired t-test.

    The deviation is None for one difference; p also where all are the same.
    """
    from scipy.stats import ttest_1samp

    d = np.asarray(differences, dtype=np.float64)
    several = len(d) > 1
    varied = several and float(np.ptp(d)) > 1e-12
    return [
        len(d),
        float(d.mean()),
        float(d.std(ddof=1)) if several else None,
        int((d > 0).sum()),
        int((d < 0).sum()),
        float(ttest_1samp(d, 0.0).pvalue) if varied else None,
    ]
