"""Sections about several runs with tables: means over seeds, and all runs to be sorted and filtered."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, stdev

from rayfed.report.page.cost import bytes_of
from rayfed.report.page.find import Member
from rayfed.report.page.parts import Cell, Column, Grid, Kind, Part, Section, Tiles
from rayfed.report.table import total_cost, total_steps

MEAN = "mean over domains"
UNSEEN = " (held out)"
"""What follows the name of a domain of which no client has an example."""

COST = (
    *(Column("sent", "bytes"), Column("local steps", "count"), Column("on examples", "count")),
    *(Column("training, GFLOP", "number"), Column("trained parameters", "count")),
)
"""Columns about the cost of a run: bytes, training batches, examples in them and operations of all clients,
and what one of them trains."""

Groups = Mapping[str, Sequence[Member]]


def grouped(members: Sequence[Member]) -> dict[str, list[Member]]:
    """Runs that differ in their seeds alone, by method and setting."""
    groups: dict[str, list[Member]] = {}
    for member in members:
        groups.setdefault(member.group, []).append(member)
    return groups


def headline(member: Member) -> float | None:
    """The score that a run is judged by: that of the held-out domain in folds, else the mean over domains."""
    run = member.run
    return run.held_out_score if run.by_validation else run.number("{}_domain")


def summary(members: Sequence[Member]) -> Section:
    """How many runs there are, the best of them, and means over seeds."""
    groups = grouped(members)
    score = Column("", "percent")
    pairs = [("runs", str(len(members))), ("finished", str(sum(_finished(m) for m in members)))]
    for what, count in (
        ("methods", len({m.method for m in members})),
        ("seeds", len({m.run.seed for m in members})),
        ("clients", max(len(m.run.clients) for m in members)),
    ):
        pairs.append((what if count != 1 else what[:-1], str(count)))
    folds = methods(groups)
    levels = {name: mean_of(headline, group) for name, group in (folds or groups).items()}
    found = {name: mean for name, mean in levels.items() if mean is not None}
    if found:
        best = max(found, key=lambda name: found[name])
        what = "held-out score" if members[0].run.by_validation else "mean over domains"
        pairs.append((f"highest {what}: {best}, %", score.show(found[best])))
    parts: list[Part] = [Tiles(title="Runs", pairs=pairs)]
    if folds:
        parts.append(_means(folds, "Mean over settings and seeds", setting=False))
    return Section("Summary", [*parts, _means(groups, "Mean over seeds")])


def methods(groups: Groups) -> dict[str, list[Member]]:
    """All runs of each method, where there are several settings and every method has runs in each of them.

    Empty otherwise, as means over different settings cannot be compared; and where the settings are the
    trials of a single method. Parts of a protocol other than leave_one_out are left out.
    """
    found: dict[str, list[Member]] = {}
    for group in groups.values():
        if averaged := [member for member in group if member.averaged]:
            found.setdefault(group[0].method, []).extend(averaged)
    settings = [{m.setting for m in group} for group in found.values()]
    same = bool(settings) and len(settings[0]) > 1 and all(one == settings[0] for one in settings)
    folds = all(m.run.by_validation for group in groups.values() for m in group)
    return found if same and (len(found) > 1 or folds) else {}


def _finished(member: Member) -> bool:
    return len(member.run.rounds) >= member.run.planned


def mean_of(of: Callable[[Member], float | None], group: Sequence[Member]) -> float | None:
    values = [value for member in group if (value := of(member)) is not None]
    return fmean(values) if values else None


def level(group: Sequence[Member]) -> float:
    """The mean by which runs are ranked (`headline`); minus infinity where none of them has a score."""
    mean = mean_of(headline, group)
    return -math.inf if mean is None else mean


STATISTICS: Mapping[str, tuple[Kind, Callable[[Member], float | None]]] = {
    "held-out domain": ("percent", lambda m: m.run.held_out_score),
    MEAN: ("percent", lambda m: m.run.number("{}_domain")),
    "mean over clients": ("percent", lambda m: m.run.number("{}")),
    "worst domain": ("percent", lambda m: m.run.number("worst_domain_{}")),
    "unseen clients": ("percent", lambda m: m.run.unseen.get("unseen clients")),
    "unseen clients, adapted": ("percent", lambda m: m.run.unseen.get("unseen clients, adapted")),
    "worst tenth of the clients": ("percent", lambda m: m.run.number("worst_tenth_{}")),
    "sigma_type": ("points", lambda m: m.run.number("sigma_type")),
    "sigma_client": ("points", lambda m: m.run.number("sigma_client")),
}
"""Statistics of the reported round, with what they are."""


def _shown(members: Sequence[Member]) -> dict[str, tuple[Kind, Callable[[Member], float | None]]]:
    """The statistics that some run has."""
    return {n: (k, of) for n, (k, of) in STATISTICS.items() if any(of(m) is not None for m in members)}


def _means(groups: Groups, title: str, setting: bool = True) -> Grid:
    """Mean and sample standard deviation over the runs of every group.

    Args:
        groups: The runs.
        title: What it is the mean over.
        setting: The runs of a group share their setting.
    """
    shown = _shown([m for group in groups.values() for m in group])
    several = any(len(group) > 1 for group in groups.values())
    columns = [Column("method"), Column("setting")]
    for name, (kind, _) in shown.items():
        columns.append(Column(name, kind))
        if several:
            columns.append(Column(f"deviation of {name}", "points", "±"))
    rows: list[list[Cell]] = []
    for group in groups.values():
        row: list[Cell] = [group[0].method, group[0].setting if setting else ""]
        for _, of in shown.values():
            values = [value for member in group if (value := of(member)) is not None]
            row.append(fmean(values) if values else None)
            if several:
                row.append(stdev(values) if len(values) > 1 else None)
        rows.append([*row, len(group)])
    columns.append(Column("runs", "count"))
    columns, rows = without_empty(columns, rows, "setting")
    caption = "±: sample standard deviation over the runs." if several else ""
    return Grid(title=title if several else "Results", caption=caption, columns=columns, rows=rows)


def without_empty(
    columns: list[Column], rows: list[list[Cell]], *names: str
) -> tuple[list[Column], list[list[Cell]]]:
    """Columns and rows without the columns of these names that are empty in every row."""
    kept = [i for i, c in enumerate(columns) if c.name not in names or any(row[i] for row in rows)]
    return [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]


def results(members: Sequence[Member]) -> Section:
    """The table of all runs and domains, to be sorted and filtered."""
    shown = {n: each for n, each in _shown(members).items() if n not in (MEAN, "held-out domain")}
    columns = [Column("method"), Column("setting"), Column("score", "percent"), Column("domain")]
    columns += [Column("seed", "count"), Column("loss", "number")]
    columns += [Column(name, kind) for name, (kind, _) in shown.items()]
    columns += [Column("reported round", "count"), Column("rounds"), *COST]
    columns += [Column("time", "seconds"), Column("folder")]
    rows: list[list[Cell]] = []
    for member in members:
        rows += _rows_of(member, [of for _, of in shown.values()])
    columns, rows = without_empty(columns, rows, "setting", *(column.name for column in COST[1:]))
    filters = {c.name: "" for c in columns if c.name in ("method", "setting")} | {"seed": "", "domain": MEAN}
    caption = "One row for each run and domain. A click on a heading sorts by it."
    return Section(
        "All runs", [Grid(title="Runs", caption=caption, columns=columns, rows=rows, filters=filters)]
    )


def _rows_of(member: Member, statistics: Sequence[Callable[[Member], float | None]]) -> Iterator[list[Cell]]:
    """The rows of a run in the table of all runs: its means, then each domain."""
    run = member.run
    sent = float(sum(bytes_of(row) for row in run.rounds))
    seconds = float(sum(seconds_of(row) for row in run.rounds))
    gflops, trained = total_cost(run.rounds)
    rest: list[Cell] = [run.row.get("round"), f"{len(run.rounds)}/{run.planned}", sent]
    rest += [number or None for number in total_steps(run.rounds)]
    rest += [gflops or None, trained or None, seconds, str(run.path)]
    own = [of(member) for of in statistics]
    means = (MEAN, run.number("{}_domain"), run.number("loss"), own)
    empty: list[float | None] = [None] * len(statistics)
    for domain, score, loss, each in (means, *((*found, empty) for found in domains_of(member))):
        yield [member.method, member.setting, score, domain, run.seed, loss, *each, *rest]


def domains_of(member: Member) -> Iterator[tuple[str, float, float | None]]:
    """Name, score and loss of every domain of a run in its reported round."""
    run = member.run
    for of, suffix in (("domain", ""), ("held out", UNSEEN)):
        scores, loss = (run.now(of, run.deployed, metric) for metric in (run.metric, "loss"))
        if of == "held out" and scores.empty:
            scores, loss = (run.now(of, "global", metric) for metric in (run.metric, "loss"))
        for name in run.order([str(each) for each in scores.index]):
            yield name + suffix, float(scores[name]), loss.get(name)
