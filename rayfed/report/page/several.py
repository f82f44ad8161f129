"""The page about several runs: a sweep, a comparison, folds, a reproduced table, or any run folders.

Tables and curves are means over seeds; methods are compared in pairs on the same setting and seed, or the
same clients.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeAlias

import numpy as np

from rayfed.columns import (
    ACCURACY,
    BYTES_DOWN,
    BYTES_UP,
    DEPLOYED,
    HELD_OUT,
    LOSS,
    MEAN,
    OVER_DOMAINS,
    SECONDS,
    SIGMA_CLIENT,
    SIGMA_TYPE,
    WORST_DOMAIN,
    WORST_TENTH,
    Kind,
    ResultColumn,
    is_larger_better,
    level_words,
    share_of,
    work_in,
)
from rayfed.config.variants import PROTOCOLS, Protocol
from rayfed.errors import ConfigError, count_of, unknown
from rayfed.evaluation.family_tests import MARGIN, PairedTest, resolution_in_words, run_family_tests
from rayfed.record.readers import ROWS, STUDY, read_json, reading
from rayfed.record.recorded_run import RecordedRun, Rule
from rayfed.report.comparison import frozen_notes
from rayfed.report.final_table import head_notes, some_clients, total_cost, total_steps
from rayfed.report.method_runs import StudyRuns, runs_in
from rayfed.report.page import single
from rayfed.report.page.charts import ROUND, Axis, Cells, Series, curves, heat_map, share_axis
from rayfed.report.page.parts import Chapter, Page, Part, Section, Sentences, Tiles, shown_as
from rayfed.report.page.single import (
    NOT_COMPARED,
    bytes_of,
    config_text,
    cumulative,
    flat,
    repeat_command,
    seconds_of,
    sections,
    single_page,
    spread_table,
    test_sets,
)
from rayfed.report.protocols import TABLES
from rayfed.report.tuned_values import TunedValues
from rayfed.terminal.table_formats import Cell, Column, Table
from rayfed.types import Row
from rayfed.user_files import as_scalar, check_run_folder

SEED = re.compile(r", seed \d+")
"""The part that differs between titles of tables of one experiment with several seeds."""


def protocol_tables(study: StudyRuns) -> list[Table]:
    """The tables of the protocol of a study, from its finished runs by seed; none without a protocol."""
    if study.protocol not in TABLES:
        return []
    seeds = [runs for each in study.seeds if (runs := each.finished()).folders]
    return [grid_of(table) for runs in seeds for table in TABLES[study.protocol](runs).parts]


def grid_of(table: Table) -> Table:
    """A table of text as one that can be sorted; columns in which all words are numbers hold numbers."""
    places = range(len(table.columns))
    texts = table.texts[1:]
    numeric = [all(_number(row[i]) is not None for row in texts if row[i]) for i in places]
    columns = [
        Column(name, "number" if own and i else "text")
        for i, (name, own) in enumerate(zip(table.texts[0], numeric, strict=True))
    ]
    rows: list[Sequence[Cell]] = [
        [
            _number(text) if column.kind == "number" else text
            for text, column in zip(row, columns, strict=True)
        ]
        for row in texts
    ]
    return Table(title=table.title, notes=table.notes, columns=columns, rows=rows)


def over_seeds(tables: Sequence[Table]) -> list[Table]:
    """Means over seeds of tables of protocols, with sample standard deviations.

    Args:
        tables: Tables of several folders.

    Returns:
        One table for all those whose titles differ in the seed alone; none where a seed occurs twice. Rows
        are those whose words are the same in two or more tables; the numbers of rounds are left out.
    """
    groups: dict[tuple[str, ...], list[Table]] = {}
    for table in tables:
        kinds = (f"{column.name} {column.kind}" for column in table.heads)
        groups.setdefault((SEED.sub("", table.title), *kinds), []).append(table)
    several = {key: own for key, own in groups.items() if len({t.title for t in own}) == len(own) > 1}
    means = [_mean_of(title, own) for (title, *_), own in several.items()]
    return [grid for grid in means if grid.rows]


def _mean_of(title: str, tables: Sequence[Table]) -> Table:
    """Mean and deviation of the numbers in rows with the same words."""
    given = list(enumerate(tables[0].heads))
    words = [(place, column) for place, column in given if column.kind == "text"]
    numbers = [(place, column) for place, column in given if (place, column) not in words]
    numbers = [(place, column) for place, column in numbers if column.name != "round"]
    same: dict[tuple[Cell, ...], list[Sequence[Cell]]] = {}
    for row in (row for table in tables for row in table.rows):
        same.setdefault(tuple(row[place] for place, _ in words), []).append(row)
    rows: list[list[Cell]] = []
    for key, group in same.items():
        cells: list[Cell] = []
        for place, _ in numbers:
            values = [float(value) for row in group if (value := row[place]) is not None]
            cells += [fmean(values) if values else None, stdev(values) if len(values) > 1 else None]
        if len(group) > 1:
            rows.append([*key, *cells, len(group)])
    columns = [column for _, column in words]
    for _, column in numbers:
        columns += [column, Column(f"deviation of {column.name}", "number", "±")]
    columns.append(Column("runs", "count"))
    caption = "Mean over seeds of the tables above; ±: sample standard deviation."
    return Table(title=f"{title}, mean over seeds", notes=(caption,), columns=columns, rows=rows)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


REPRODUCTION = "reproduction.json"
"""A folder with this file is that of a reproduced table."""
SIDE = ("seed", "cluster.", "data.cache", "checkpoint.", "tensorboard", "trackers", *NOT_COMPARED)
"""Beginnings of keys of the config that do not tell settings apart."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A run on a page about several.

    Attributes:
        run: The run.
        method: Its method, or its row of a table.
        setting: What else tells it apart besides the seed; may be empty.
        averaged: A mean over its settings is reported. Of protocols, only the folds of leave_one_out have
            one: means over base and new classes, or over numbers of shots, say nothing.
        margin: Largest difference that its study counts as equally good; None: that of the metric.
    """

    run: RecordedRun
    method: str
    setting: str = ""
    averaged: bool = True
    margin: float | None = None

    @property
    def group(self) -> str:
        """Method and setting: what the runs share that differ in their seeds alone."""
        return f"{self.method}, {self.setting}" if self.setting else self.method

    @property
    def name(self) -> str:
        return f"{self.group}, seed {self.run.seed}"


@dataclass(frozen=True, kw_only=True)
class FolderContent:
    """Content of a folder: its runs, studies or jobs.

    Attributes:
        title: What it is.
        members: Its runs.
        heading: Heading of its tables.
        tables: Tables of the folder as a whole.
        repeat: Command that repeats it; empty: there is none for the whole.
    """

    title: str
    members: Sequence[Member]
    heading: str = ""
    tables: Sequence[Table] = ()
    repeat: str = ""


def find(path: Path) -> FolderContent:
    """The runs in a folder.

    Raises:
        ConfigError: It holds no run, no study and no reproduced table.
        DamagedError: A file in it cannot be read.
    """
    if (path / REPRODUCTION).exists():
        return _reproduction(path)
    if (path / STUDY).exists():
        return _study(path)
    check_run_folder(path)
    run = RecordedRun.opened(path)
    members = [Member(run=run, method=run.method)]
    return FolderContent(
        title=members[0].run.name, members=members, repeat=repeat_command(path / "config.yaml")
    )


def _study(path: Path) -> FolderContent:
    """The cells of a study that have begun: rows of its table, over parts and seeds."""
    tree = read_json(path / STUDY, dict)
    members = []
    with reading(path / STUDY):
        cells = [(str(c["label"]), c["coordinates"], path / c["folder"]) for c in tree["cells"]]
        rule: Rule = "validation" if tree["reported"] == "validation" else "final"
        protocol = PROTOCOLS.get(tree["protocol"])
        margin = None if tree.get("margin") is None else float(tree["margin"])
    begun = [each for each in cells if (each[2] / ROWS).exists()]
    for label, at, folder in begun:
        run, part = RecordedRun.opened(folder, rule), at.get("part")
        words = str(part) if protocol is None else protocol.setting.format(name=part)
        setting, averaged = ("", True) if part is None else (words, run.by_validation)
        members.append(Member(run=run, method=label, setting=setting, averaged=averaged, margin=margin))
    if not members:
        raise ConfigError(f"{path}: none of the study's cells has begun; there is nothing to report yet")
    tables = list(protocol_tables(runs_in(path)))
    with reading(path / STUDY):
        tuning = [TunedValues.read(tree["tuned"]).table] if "tuned" in tree else []
    found = FolderContent(
        title=_title(members, protocol, len(cells)),
        members=members,
        heading="The protocol" if tables else "Tuning",
        tables=[*tables, *tuning],
        repeat=repeat_command(path / "config.yaml") if (path / "config.yaml").exists() else "",
    )
    if "search" not in tree:
        return found
    with reading(path / STUDY):
        return _with_trials(found, path, tree["search"], [at for _, at, _ in begun])


MOST_IN_TITLE = 5
"""Largest number of methods that the title of a page about runs in several folders names."""


def _title(members: Sequence[Member], protocol: Protocol | None, cells: int) -> str:
    """Title of the page about a study."""
    methods = list(dict.fromkeys(member.method for member in members))
    if len(members) == 1:
        return members[0].run.name
    if len(methods) > MOST_IN_TITLE:
        return f"Study of {count_of(cells, 'cell')}"
    how = ", each domain held out in turn" if protocol is not None and protocol.by_validation else ""
    return f"{', '.join(methods)} on {members[0].run.data}{how}"


def _with_trials(
    found: FolderContent, path: Path, search: Mapping[str, Any], at: Sequence[Mapping[str, Any]]
) -> FolderContent:
    """The content of the study of a search: its runs have the numbers of their trials.

    Args:
        search: The trials, as study.json has them.
        at: The coordinates of each run.
    """
    keys, numbers = list(search["space"]), dict[tuple[Any, ...], int]()
    for trial in search["trials"]:
        numbers.setdefault(tuple(as_scalar(trial["values"].get(key)) for key in keys), trial["number"])
    members = []
    for member, own in zip(found.members, at, strict=True):
        setting = f"trial {numbers[tuple(own[key] for key in keys)]}"
        setting += f", {member.setting}" if member.setting else ""
        members.append(replace(member, method=member.run.method, setting=setting))
    best = path / "best.yaml"
    return replace(
        found,
        title=f"Sweep {search['name']}" if search["name"] else f"Search of {count_of(len(numbers), 'trial')}",
        members=members,
        heading="Trials",
        tables=[_trials(search), *found.tables],
        repeat=repeat_command(best) if best.exists() else found.repeat,
    )


def _trials(search: Mapping[str, Any]) -> Table:
    """The table of all trials: their state, objectives and hyperparameters."""
    trials, objectives, space = search["trials"], list(search["objectives"]), list(search["space"])
    errors = ["error"] if any(trial["error"] for trial in trials) else []
    names = ["trial", "state", *objectives, *space, *errors]
    rows: list[list[Cell]] = []
    for trial in trials:
        values = [*map(trial["scores"].get, objectives), *map(trial["values"].get, space)]
        rows.append([*map(_cell, (trial["number"], trial["state"], *values, *map(trial.get, errors)))])
    kinds: dict[str, Kind] = {"trial": "count", "state": "text", "error": "text"}
    columns = []
    for place, name in enumerate(names):
        numbers = all(isinstance(row[place], int | float | None) for row in rows)
        columns.append(Column(name, kinds.get(name, "number" if numbers else "text")))
    caption = f"Searched were {', '.join(space)}."
    return Table(title="Trials", notes=(caption,), columns=columns, rows=rows, filters={"state": ""})


def _cell(value: Any) -> Cell:
    return value if isinstance(value, str | int | float) or value is None else config_text(value)


def _reproduction(path: Path) -> FolderContent:
    """The cells of a reproduced table, with ours, the paper's numbers and the verdicts."""
    file = path / REPRODUCTION
    tree = read_json(file, dict)
    with reading(file):
        title = f"{tree['title']} ({tree['experiment']}, {tree['scale']})"
        cells = [(c["row"], c["setting"], c.get("parts") or {"": c["path"]}) for c in tree["cells"]]
        tables = [_values(tree), _claims(tree)]
        repeat = f"python -m rayfed.reproduce {tree['experiment']} --scale {tree['scale']}"
    members = []
    for row, setting, folders in cells:
        for part, folder in folders.items():
            if (path / folder / "config.yaml").exists():
                held_out = PROTOCOLS["leave_one_out"].setting.format(name=part) if part else ""
                words = ", ".join(filter(None, (setting, held_out)))
                run = RecordedRun.opened(path / folder, "validation" if part else "final")
                members.append(Member(run=run, method=row, setting=words))
    if not members:
        raise ConfigError(f"{path}: none of the table's runs has begun; there is nothing to report yet")
    heading = "The paper's table"
    return FolderContent(title=title, members=members, heading=heading, tables=tables, repeat=repeat)


def _values(tree: Mapping[str, Any]) -> Table:
    """Ours next to the paper's numbers. `reproduction.json` holds them as they are shown."""
    columns = [Column("row"), Column("setting"), Column("measure"), Column("seeds", "count")]
    columns += [Column(name, "number") for name in ("ours", "deviation", "paper", "difference")]
    rows: list[list[Cell]] = [
        [v[key] for key in ("row", "setting", "measure", "seeds", "mean", "sd", "paper", "difference")]
        for v in tree["values"]
    ]
    filters = {"setting": "", "measure": ""}
    rule = str(tree["selection"]).rstrip(".")
    caption = f"Mean over seeds, with the sample standard deviation; of each run is reported: {rule}."
    return Table(
        title="Ours and the paper's numbers", notes=(caption,), columns=columns, rows=rows, filters=filters
    )


def _claims(tree: Mapping[str, Any]) -> Table:
    """The orderings in the paper's numbers and what our runs say about them."""
    columns = [Column("better"), Column("worse"), Column("setting"), Column("measure")]
    columns += [Column("paper's difference", "number"), Column("our difference", "number")]
    columns += [Column("low", "number"), Column("high", "number"), Column("seeds", "count"), Column("p", "p")]
    columns += [Column("verdict"), Column("seeds needed", "count")]
    keys = (
        "better",
        "worse",
        "setting",
        "measure",
        "paper_difference",
        "difference",
        "low",
        "high",
        "seeds",
        "p",
        "verdict",
        "seeds_needed",
    )
    rows: list[list[Cell]] = [[claim.get(key) for key in keys] for claim in tree["claims"]]
    caption = (
        "Verdict: of the row that is better in the paper; low, high and p hold for all orderings of the "
        "table together; none for a single seed. Tables that were written with an earlier version have words "
        "and p of an uncorrected paired t-test, and no interval."
    )
    filters = {"verdict": "", "setting": "", "measure": ""}
    return Table(
        title="Orderings of the paper", notes=(caption,), columns=columns, rows=rows, filters=filters
    )


def distinguish(members: Sequence[Member]) -> list[Member]:
    """The same members, such that no two share method, setting and seed.

    Settings in which they differ become part of the setting; where none differs, the name of the folder.
    """
    groups: dict[tuple[str, str, int], list[Member]] = {}
    for member in members:
        groups.setdefault((member.method, member.setting, member.run.seed), []).append(member)
    keys: set[str] = set()
    for group in groups.values():
        configs = [dict(flat(member.run.config)) for member in group]
        keys |= {
            key
            for key in configs[0]
            if not key.startswith(SIDE) and len({config_text(one.get(key)) for one in configs}) > 1
        }
    named = [_with(member, sorted(keys)) for member in members]
    counts = [(m.method, m.setting, m.run.seed) for m in named]
    return [
        member if counts.count(key) == 1 else _extend(member, str(member.run.path))
        for member, key in zip(named, counts, strict=True)
    ]


def _with(member: Member, keys: Sequence[str]) -> Member:
    config = dict(flat(member.run.config))
    return _extend(member, ", ".join(f"{key}={config_text(config.get(key))}" for key in keys))


def _extend(member: Member, words: str) -> Member:
    parts = (part for part in (member.setting, words) if part)
    return replace(member, setting=", ".join(parts))


UNSEEN = " (held out)"
"""Suffix of the name of a domain of which no client has an example."""

COST = (
    *(Column("sent", "bytes"), Column("local steps", "count"), Column("on examples", "count")),
    *(Column("tokens", "count"), Column("training, GFLOP", "number"), Column("trained parameters", "count")),
)
"""Columns about the cost of a run: bytes, training batches, examples and tokens in them, operations of all
clients, and what one of them trains."""

Groups = Mapping[str, Sequence[Member]]


def runs_by_setting(members: Sequence[Member]) -> dict[str, list[Member]]:
    """Runs that differ in their seeds alone, by method and setting."""
    groups: dict[str, list[Member]] = {}
    for member in members:
        groups.setdefault(member.group, []).append(member)
    return groups


def headline(member: Member) -> float | None:
    """The score that a run is judged by: that of the held-out domain in folds, else the mean over domains."""
    run = member.run
    return run.held_out_score if run.by_validation else run.number(OVER_DOMAINS)


def summary(members: Sequence[Member]) -> Section:
    """Number of runs, the best of them, and means over seeds."""
    groups = runs_by_setting(members)
    metric = members[0].run.metric
    score = Column("", shown_as("percent", metric))
    pairs = [("runs", str(len(members))), ("finished", str(sum(_is_finished(m) for m in members)))]
    for what, count in (
        ("methods", len({m.method for m in members})),
        ("seeds", len({m.run.seed for m in members})),
        ("clients", max(len(m.run.clients) for m in members)),
    ):
        pairs.append((what if count != 1 else what[:-1], str(count)))
    folds = methods(groups)
    levels = {name: mean_of(headline, group) for name, group in (folds or groups).items()}
    means = {name: mean for name, mean in levels.items() if mean is not None}
    if means:
        sign = 1 if is_larger_better(metric) else -1
        best = max(means, key=lambda name: sign * means[name])
        what = "held-out score" if members[0].run.by_validation else "mean over domains"
        first = "highest" if sign > 0 else "lowest"
        pairs.append(
            (f"{first} {what}: {best}{', %' if score.kind == 'percent' else ''}", score.show(means[best]))
        )
    parts: list[Part] = [Tiles(title="Runs", pairs=pairs)]
    if folds:
        parts.append(_means(folds, MEANS[1], setting=False))
    return Section("Summary", [*parts, _means(groups, MEANS[0])])


def methods(groups: Groups) -> dict[str, list[Member]]:
    """All runs of each method, where there are several settings and every method has runs in each of them.

    Empty otherwise, as means over different settings cannot be compared; and where the settings are the
    trials of a single method. Parts of a protocol other than leave_one_out are left out.
    """
    by_method: dict[str, list[Member]] = {}
    for group in groups.values():
        if averaged := [member for member in group if member.averaged]:
            by_method.setdefault(group[0].method, []).extend(averaged)
    settings = [{m.setting for m in group} for group in by_method.values()]
    same = bool(settings) and len(settings[0]) > 1 and all(one == settings[0] for one in settings)
    folds = all(m.run.by_validation for group in groups.values() for m in group)
    return by_method if same and (len(by_method) > 1 or folds) else {}


def _is_finished(member: Member) -> bool:
    return member.run.has_all_rounds


def mean_of(of: Callable[[Member], float | None], group: Sequence[Member]) -> float | None:
    values = [value for member in group if (value := of(member)) is not None]
    return fmean(values) if values else None


def level(group: Sequence[Member]) -> float:
    """The mean by which runs are ranked (`headline`); minus infinity where none of them has a score."""
    mean = mean_of(headline, group)
    sign = 1 if not group or is_larger_better(group[0].run.metric) else -1
    return -math.inf if mean is None else sign * mean


Statistics: TypeAlias = Mapping[str, tuple[Kind, Callable[[Member], float | None]]]
"""Statistics of the reported round by their words, with what they are."""


def _statistics(*columns: ResultColumn) -> Statistics:
    """Those that are columns of a round of the models that are deployed."""
    return {c.words: (c.kind, partial(lambda m, column: m.run.number(column), column=c)) for c in columns}


STATISTICS: Statistics = {
    "held-out domain": ("percent", lambda m: m.run.held_out_score),
    **_statistics(OVER_DOMAINS, MEAN, WORST_DOMAIN),
    "unseen clients": ("percent", lambda m: m.run.unseen.get("unseen clients")),
    "unseen clients, adapted": ("percent", lambda m: m.run.unseen.get("unseen clients, adapted")),
    "without_adapters": ("percent", lambda m: m.run.without.get("adapters")),
    "without_head": ("percent", lambda m: m.run.without.get("head")),
    **_statistics(WORST_TENTH, SIGMA_TYPE, SIGMA_CLIENT),
}


def _shown_statistics(members: Sequence[Member]) -> Statistics:
    """The statistics that some run has."""
    metric = members[0].run.metric if members else ACCURACY
    return {
        level_words(metric) if n == MEAN.words else n: (shown_as(k, metric), of)
        for n, (k, of) in STATISTICS.items()
        if any(of(m) is not None for m in members)
    }


DEVIATION = "deviation of "
"""Beginning of the name of a column of deviations."""
MEANS = ("Mean over seeds", "Mean over settings and seeds")
"""Titles of the tables of means, which a file of LaTeX has, too."""


def _means(groups: Groups, title: str, setting: bool = True) -> Table:
    """Mean and sample standard deviation over the runs of every group.

    Args:
        groups: The runs.
        title: What it is the mean over.
        setting: The runs of a group share their setting.
    """
    shown = _shown_statistics([m for group in groups.values() for m in group])
    several = any(len(group) > 1 for group in groups.values())
    columns = [Column("method"), Column("setting")]
    for name, (kind, _) in shown.items():
        columns.append(Column(name, kind))
        if several:
            columns.append(
                Column(f"{DEVIATION}{name}", "points" if kind in ("percent", "points") else kind, "±")
            )
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
    every = [member for group in groups.values() for member in group]
    caption = " ".join([caption + _own_models(every), *_heads(every)]).strip()
    return Table(title=title if several else "Results", notes=(caption,), columns=columns, rows=rows)


def latex_of(page: Page) -> str:
    """The means over seeds of a page as tables of LaTeX, and the tested differences; empty: no means.

    A mean has its sample standard deviation (mean ± deviation), a difference its interval and verdict.
    """
    tables = [part for section in page.sections for part in section.parts if isinstance(part, Table)]
    means = [_merged(table) for table in tables if table.title in MEANS]
    tested = [_differences(table) for table in tables if table.title == PAIRED]
    return "\n".join(table.latex() for table in [*means, *(each for each in tested if each.rows)] if means)


def _differences(table: Table) -> Table:
    """The tested rows of the paired comparisons: each difference with its interval."""
    names = [head.name for head in table.heads]
    at = {name: names.index(name) for name in ("mean of A minus B", "low", "high", "p", "A is", "pairs of")}
    heads = list(table.heads)
    words = [name for name in ("setting", "A", "B", "score") if name in names]
    rows: list[list[Cell]] = []
    for row in table.rows:
        if row[at["pairs of"]] == SEEDS:
            mean, low, high, p = (
                heads[at[name]].show(row[at[name]]) for name in ("mean of A minus B", "low", "high", "p")
            )
            interval = f"{mean} [{low}, {high}]" if row[at["low"]] is not None else mean
            rows.append([*(row[names.index(name)] for name in words), interval, p, row[at["A is"]]])
    columns = [*(Column(name) for name in words), Column("A minus B [95 %]"), Column("p"), Column("A is")]
    return Table(table.title, columns, rows)


def _merged(table: Table) -> Table:
    """A table in which each mean and its deviation are one cell; scores in percent."""
    heads = list(table.heads)
    spread = {head.name.removeprefix(DEVIATION): at for at, head in enumerate(heads) if head.short == "±"}
    kept = [at for at, head in enumerate(heads) if head.short != "±"]
    rows = []
    for row in table.rows:
        cells = {at: heads[at].show(row[at]) for at in kept}
        for name, at in spread.items():
            mean = next(place for place in kept if heads[place].name == name)
            if row[at] is not None:
                cells[mean] += f" ± {heads[at].show(row[at])}"
        rows.append([*cells.values()])
    left = frozenset(place for place, at in enumerate(kept) if heads[at].kind == "text")
    return Table(table.title, [heads[at].heading for at in kept], rows, left=left)


def without_empty(
    columns: list[Column], rows: list[list[Cell]], *names: str
) -> tuple[list[Column], list[list[Cell]]]:
    """Columns and rows without the columns of these names that are empty in every row."""
    kept = [i for i, c in enumerate(columns) if c.name not in names or any(row[i] for row in rows)]
    return [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]


def results(members: Sequence[Member]) -> Section:
    """The table of all runs and domains, to be sorted and filtered."""
    elsewhere = (OVER_DOMAINS.words, "held-out domain")
    shown = {n: each for n, each in _shown_statistics(members).items() if n not in elsewhere}
    metric = members[0].run.metric if members else ACCURACY
    score = Column("score", shown_as("percent", metric))
    columns = [Column("method"), Column("setting"), Column("head"), score, Column("domain")]
    columns += [Column("seed", "count"), Column("loss", "number")]
    columns += [Column(name, kind) for name, (kind, _) in shown.items()]
    columns += [Column("reported round", "count"), Column("rounds"), *COST]
    columns += [Column("time", "seconds"), Column("folder")]
    rows: list[list[Cell]] = []
    for member in members:
        rows += _rows_of(member, [of for _, of in shown.values()])
    columns, rows = without_empty(columns, rows, "setting", "head", *(column.name for column in COST[1:]))
    filters = {c.name: "" for c in columns if c.name in ("method", "setting")}
    filters |= {"seed": "", "domain": OVER_DOMAINS.words}
    caption = "One row for each run and domain. A click on a heading sorts by it."
    return Section(
        "All runs", [Table(title="Runs", notes=(caption,), columns=columns, rows=rows, filters=filters)]
    )


def _rows_of(member: Member, statistics: Sequence[Callable[[Member], float | None]]) -> Iterator[list[Cell]]:
    """The rows of a run in the table of all runs: its means, then each domain."""
    run = member.run
    sent = float(BYTES_UP.total(run.rounds) + BYTES_DOWN.total(run.rounds))
    seconds = float(SECONDS.total(run.rounds))
    gflops, trained = total_cost(run.rounds)
    rest: list[Cell] = [run.reported.get("round"), f"{len(run.rounds)}/{run.planned}", sent]
    rest += [number or None for number in (*total_steps(run.rounds), int(work_in("tokens", run.rounds)))]
    rest += [gflops or None, trained or None, seconds, str(run.path)]
    own = [of(member) for of in statistics]
    means = (OVER_DOMAINS.words, run.number(OVER_DOMAINS), run.number(LOSS), own)
    empty: list[float | None] = [None] * len(statistics)
    for domain, score, loss, each in (means, *((*found, empty) for found in domains_of(member))):
        head = run.environment.get("head")
        yield [member.method, member.setting, head, score, domain, run.seed, loss, *each, *rest]


def domains_of(member: Member) -> Iterator[tuple[str, float, float | None]]:
    """Name, score and loss of every domain of a run in its reported round."""
    run = member.run
    for of, suffix in (("domain", ""), ("held out", UNSEEN)):
        scores, loss = (run.now(of, run.deployed, metric) for metric in (run.metric, "loss"))
        if of == "held out" and scores.empty:
            scores, loss = (run.now(of, "global", metric) for metric in (run.metric, "loss"))
        for name in run.order([str(each) for each in scores.index]):
            yield name + suffix, float(scores[name]), loss.get(name)


MOST_DOMAINS = 12
"""Largest number of domains that have a column each."""
MOST_CURVES = 10
"""Largest number of groups of runs with a curve each; of more, those with the highest scores have one."""

BANDS = "Mean over seeds; bands: from the lowest to the highest seed."
SCORE = Axis(name="score")
"""Stands for the axis of the score of the runs."""
CURVES: Mapping[str, tuple[ResultColumn, str, Axis]] = {
    "Score, mean over domains": (OVER_DOMAINS, DEPLOYED, SCORE),
    "Score of the held-out domain": (MEAN, HELD_OUT, SCORE),
    "Score of the worst domain": (WORST_DOMAIN, DEPLOYED, SCORE),
    "Deviation over domains": (SIGMA_TYPE, DEPLOYED, Axis(name=SIGMA_TYPE.words, kind="points", low=0.0)),
    "Loss, mean over clients": (LOSS, DEPLOYED, Axis(name=LOSS.words)),
}
"""Columns of a round that have a chart, by its title, with whose scores they are of and the vertical axis."""


def over_rounds(members: Sequence[Member]) -> Section:
    """Curves of every group of runs, mean over seeds with a band from the lowest to the highest seed."""
    groups, words = _best(runs_by_setting(members))
    parts: list[Part] = []
    for title, (column, of, axis) in CURVES.items():
        series = [_of_group(name, group, column, of) for name, group in groups.items()]
        if not any(one.x for one in series):
            continue
        caption = BANDS if _several_seeds(groups) else ""
        shown = _score_axis(members) if axis is SCORE else axis
        parts.append(curves(title, series, ROUND, shown, f"{caption} {words}".strip()))
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


def _of_group(name: str, group: Sequence[Member], column: ResultColumn, of: str) -> Series:
    """The curve of a group. Args: of: whose scores; of deployed models, those that the run has."""
    values: dict[int, list[float]] = {}
    for member in group:
        full = column.name(member.run.metric, of or member.run.prefix)
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
    groups = runs_by_setting(members)
    scores: dict[str, dict[str, list[float]]] = {}
    for name, group in groups.items():
        for domain, score, _ in (each for member in group for each in domains_of(member)):
            bare = domain.removesuffix(UNSEEN)
            scores.setdefault(name, {}).setdefault(bare, []).append(score)
    names = list(dict.fromkeys(domain for one in scores.values() for domain in one))
    if not names:
        return Section("Domains", [])
    values = [[fmean(one[d]) if d in one else np.nan for d in names] for one in scores.values()]
    cells = Cells(
        values=np.array(values, dtype=float),
        down=list(scores),
        across=names,
        row="method",
        column="domain",
        value=Column("score", shown_as("percent", members[0].run.metric)),
    )
    title = "Score of each method on each domain"
    parts: list[Part] = [heat_map(title, cells, "Mean over seeds." if _several_seeds(groups) else "")]
    if len(names) <= MOST_DOMAINS:
        columns = [Column("method"), *(Column(name, cells.value.kind) for name in names)]
        rows: list[list[Cell]] = [[name, *row] for name, row in zip(scores, values, strict=True)]
        parts.insert(0, Table(title="Score by domain", columns=columns, rows=rows))
    return Section("Domains", parts)


def fairness(members: Sequence[Member]) -> Section:
    """Cumulative curves and spread of the clients' scores, all seeds together."""
    groups, words = _best(runs_by_setting(members))
    scores = {}
    for name, group in groups.items():
        own = [member.run.of_clients(member.run.deployed) for member in group]
        if sum(map(len, own)):
            scores[name] = np.concatenate(own)
    if not scores:
        return Section("Fairness", [])
    metric = members[0].run.metric
    runs = [member.run for group in groups.values() for member in group]
    table = spread_table(scores, metric, "method", test_sets(runs))
    return Section("Fairness", [cumulative(scores, metric, f"The clients of all seeds. {words}"), table])


def _score_axis(members: Sequence[Member]) -> Axis:
    """The axis of the scores of runs, in percent where all have one metric that is a share."""
    metrics = {member.run.metric for member in members}
    return share_axis(*metrics) if len(metrics) == 1 else SCORE


def cost(members: Sequence[Member]) -> Section:
    """Score over bytes and over time, of one seed of each group."""
    groups, words = _best(runs_by_setting(members))
    parts: list[Part] = []
    for title, axis, of in (
        ("Score over the bytes sent", Axis(name="sent in both directions", kind="bytes", low=0.0), bytes_of),
        ("Score over time", Axis(name="time", kind="seconds", low=0.0), seconds_of),
    ):
        series = [_over(name, group[0], of) for name, group in groups.items()]
        if any(one.x for one in series):
            caption = "The first seed of each." if _several_seeds(groups) else ""
            notes = frozen(members) if of is bytes_of else ""
            caption = " ".join(filter(None, (caption, words, notes)))
            parts.append(curves(title, series, axis, _score_axis(members), caption))
    return Section("Cost", parts)


def frozen(members: Sequence[Member]) -> str:
    """Sentences on methods whose bytes include frozen blocks; empty where there are none."""
    notes = {
        f"{member.method}: {note}; other methods take these blocks as installed.": None
        for member in members
        for note in frozen_notes(member.run.config)
    }
    return " ".join(notes)


def _over(name: str, member: Member, of: Callable[[Row], float]) -> Series:
    key = OVER_DOMAINS.name(member.run.metric, member.run.prefix)
    total = accumulate(of(row) for row in member.run.rounds)
    points = [
        (t, row[key]) for t, row in zip(total, member.run.rounds, strict=True) if row.get(key) is not None
    ]
    return Series(label=name, x=[t for t, _ in points], y=[v for _, v in points])


MOST_METHODS = 8
"""Largest number of methods that are all compared with each other; of more, each with the best one."""

PAIRED = "Paired comparisons"
"""Title of the table of differences between methods."""

MEASURES = (OVER_DOMAINS.words, MEAN.words, WORST_DOMAIN.words, "held-out domain")
"""Statistics by which runs are compared."""


def comparisons(members: Sequence[Member], against: str | None = None) -> Table | None:
    """Differences between methods over runs with the same setting and seed, and over the same clients.

    Where all runs have the same method, its settings are compared over seeds. Settings of which no mean is
    reported, such as base and new classes, are compared one by one. None where there is nothing to compare.

    Args:
        against: The method, or where all have the same the setting, that the others are compared with; None:
            all pairs are.

    Raises:
        ConfigError: There is no such method or setting.
    """
    by_setting = len({member.method for member in members}) == 1
    known = list(dict.fromkeys(member.setting if by_setting else member.method for member in members))
    if against is not None and against not in known:
        raise ConfigError(unknown("--against", against, known))
    apart: dict[str, list[Member]] = {}
    for member in members:
        apart.setdefault("" if by_setting or member.averaged else member.setting, []).append(member)
    found = [
        each for setting, own in apart.items() for each in _of_setting(setting, own, by_setting, against)
    ]
    if not found:
        return None
    tests, resolved = _tested(found, members)
    columns = [Column("setting"), Column("A"), Column("B"), Column("score"), Column("pairs of")]
    columns += [Column("pairs", "count")]
    columns += [Column("mean of A minus B", "points"), Column("deviation", "points")]
    columns += [Column("A higher", "count"), Column("B higher", "count")]
    columns += [Column("low", "points"), Column("high", "points"), Column("p", "p"), Column("A is")]
    columns += [Column("seeds needed", "count")]
    rows: list[list[Cell]] = [
        [
            *(each.setting, each.first, each.second, each.score, each.of),
            *statistics(list(each.values.values())),
            *_cells_of(tests.get(place)),
        ]
        for place, each in enumerate(found)
    ]
    caption = (
        "A pair of seeds has the same seed and settings, and counts once: its folds are averaged before. A "
        "pair of clients is one client under both methods, in all such runs; clients with the same test set "
        "and the same model count as one. Clients of one run share its seed: how many of them gain is said, "
        "and not tested. Of seeds: low, high: intervals, and p, which hold for all rows of a score together "
        "(95 %), with moderated variances. A is better or worse where the interval is on one side of 0, as "
        f"good where it is within {_margin_in_words(members)}, else open; the same: the difference is 0 in "
        "every seed, or both have the same bytes, and are not tested. Seeds needed: would decide an open "
        "row four times of five, if its difference is the one found."
    )
    caption += "".join(f" {name}: {words}." for name, words in resolved.items())
    caption = " ".join([caption + _own_models(members), *_heads(members)])
    unused = 0 if any(apart) else 1
    columns, rows = columns[unused:], [row[unused:] for row in rows]
    filters = dict.fromkeys((column.name for column in columns if column.kind == "text"), "")
    return Table(title=PAIRED, notes=(caption,), columns=columns, rows=rows, filters=filters)


def _heads(members: Sequence[Member]) -> list[str]:
    """A sentence on the heads of the models."""
    return [note[0].upper() + note[1:] + "." for note in head_notes([m.run for m in members], rule="")]


def _own_models(members: Sequence[Member]) -> str:
    """A sentence on methods whose scores are those of personal models, where others have a global one."""
    own = dict.fromkeys(member.method for member in members if member.run.deployed == "personal")
    some = {
        member.method: words
        for member in members
        if (words := some_clients(member.run.reported, member.run.prefix))
    }
    of_some = "".join(f" {method}: scored are {words}." for method, words in some.items())
    if not own or all(member.method in own for member in members):
        return of_some
    return (
        f" Scored are the clients' personal models of {', '.join(own)}, and the global model of the others."
        + of_some
    )


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Differences of two methods by a score.

    Attributes:
        setting: The setting, where it is not one of those that are averaged.
        first, second: The methods.
        score: The score.
        of: What pairs are: seeds or clients.
        values: By seed, or in any order of clients, the first one's score less that of the second one.
        same: Both have the same bytes in all their runs.
    """

    setting: str
    first: str
    second: str
    score: str
    of: str
    values: Mapping[int, float]
    same: bool = False


def _tested(
    found: Sequence[Compared], members: Sequence[Member]
) -> tuple[dict[int, PairedTest], dict[str, str]]:
    """The tests of rows over seeds, by the number of the row, and by score what the seeds resolve.

    The rows of a score are a family.
    """
    metric = members[0].run.metric
    tests: dict[int, PairedTest] = {}
    resolved = {}
    share = share_of(metric)
    for name in dict.fromkeys(each.score for each in found if each.of == SEEDS):
        places = [place for place, each in enumerate(found) if (each.score, each.of) == (name, SEEDS)]
        family = run_family_tests(
            [found[place].values for place in places],
            larger=is_larger_better(metric),
            margin=_margin_of(members),
            same=[found[place].same for place in places],
        )
        tests |= dict(zip(places, family.tests, strict=True))
        if words := resolution_in_words(family, " points" if share != 1 else "", share):
            resolved[name] = words
    return tests, resolved


def _cells_of(test: PairedTest | None) -> list[Cell]:
    """The cells of a test; those of clients have none."""
    if test is None:
        return [None, None, None, "", None]
    words = "the same" if test.verdict == "same" else test.verdict
    cells: list[Cell] = [test.low, test.high, test.p_corrected, words, test.needed]
    return cells


def _margin_of(members: Sequence[Member]) -> float | None:
    """Largest difference between rows that count as equally good: of their study, else that of the metric."""
    stated = {member.margin for member in members}
    if len(stated) == 1 and None not in stated:
        return stated.pop()
    return MARGIN if share_of(members[0].run.metric) != 1 else None


def _margin_in_words(members: Sequence[Member]) -> str:
    share, margin = share_of(members[0].run.metric), _margin_of(members)
    if margin is None:
        return "a margin (there is none for this metric)"
    unit = "" if share == 1 else " point" if share * margin == 1 else " points"
    return f"{share * margin:g}{unit} of 0"


SEEDS, CLIENTS = "seeds", "clients"
"""Units of pairs."""


def _of_setting(
    setting: str, members: Sequence[Member], by_setting: bool, against: str | None = None
) -> Iterator[Compared]:
    """Comparisons of the methods of these runs, or with `by_setting` of their settings.

    Args:
        against: What the others are compared with; None: each with each.
    """
    candidates: dict[str, dict[tuple[str, int], Member]] = {}
    for member in members:
        name, rest = (member.setting, "") if by_setting else (member.method, member.setting)
        candidates.setdefault(name, {})[rest, member.run.seed] = member
    pairs = list(combinations(candidates, 2))
    if against is not None:
        pairs = [(name, against) for name in candidates if name != against and against in candidates]
    elif len(candidates) > MOST_METHODS:
        best = max(candidates, key=lambda name: level(list(candidates[name].values())))
        pairs = [(best, name) for name in candidates if name != best]
    for a, b in pairs:
        for score, of, values, same in _compared(candidates[a], candidates[b]):
            yield Compared(setting=setting, first=a, second=b, score=score, of=of, values=values, same=same)


def _compared(
    first: Mapping[tuple[str, int], Member], second: Mapping[tuple[str, int], Member]
) -> Iterator[tuple[str, str, Mapping[int, float], bool]]:
    """Scores by which two methods are compared: what pairs are, differences, and whether bytes are equal."""
    shared = [key for key in first if key in second]
    for name in MEASURES:
        measure = STATISTICS[name][1]
        by_seed: dict[int, list[float]] = {}
        for key in shared:
            x, y = measure(first[key]), measure(second[key])
            if x is not None and y is not None:
                by_seed.setdefault(key[1], []).append(x - y)
        if by_seed:
            values = {seed: fmean(each) for seed, each in by_seed.items()}
            same = not any(values.values()) and all(
                first[key].run.digest == second[key].run.digest != "" for key in shared
            )
            yield name, SEEDS, values, same
    both = [d for key in shared for d in _of_clients(first[key], second[key])]
    if both:
        yield "score of a client", CLIENTS, dict(enumerate(both)), False


def _of_clients(a: Member, b: Member) -> list[float]:
    """Differences of the scores of the clients that two runs share.

    Clients with the same test set whose model is the same in each run have the same scores: they count once.
    """
    one, other = (m.run.now("client", m.run.deployed, m.run.metric).dropna() for m in (a, b))
    alike = [m.run.scored_alike(m.run.deployed) for m in (a, b)]
    shared = one.index.intersection(other.index)
    first = {tuple(each[name] for each in alike): name for name in reversed(shared)}
    kept = [name for name in shared if first[tuple(each[name] for each in alike)] == name]
    return [float(v) for v in (one[kept] - other[kept])]


def statistics(differences: Sequence[float]) -> list[Cell]:
    """Number, mean, sample standard deviation, and how many are positive and negative.

    The deviation is None for one difference.
    """
    d = np.asarray(differences, dtype=np.float64)
    return [
        len(d),
        float(d.mean()),
        float(d.std(ddof=1)) if len(d) > 1 else None,
        int((d > 0).sum()),
        int((d < 0).sum()),
    ]


MOST_CHAPTERS = 12
"""Largest number of runs that are also shown in detail."""


def page_of(
    paths: Sequence[Path],
    names: Sequence[str] = (),
    against: str | None = None,
    margin: float | None = None,
) -> Page:
    """The page about everything in these folders.

    Args:
        paths: The folders.
        names: What the run in each folder is called; empty: by its method, and by the settings in which runs
            of one method differ.
        against: The method that the others are compared with; None: each with each.
        margin: Largest difference that counts as equally good, in the unit of the score; None: that of the
            study, or of the metric.

    Raises:
        ConfigError: A folder holds no run, or there is nothing to compare in this way.
        DamagedError: A file in a folder cannot be read.
    """
    folders = [find(path) for path in dict.fromkeys(paths)]
    members = [member for one in folders for member in one.members]
    if names:
        members = [replace(member, method=name) for member, name in zip(members, names, strict=True)]
    if margin is not None:
        members = [replace(member, margin=margin) for member in members]
    if len(members) == 1 and not folders[0].tables:
        if against is not None:
            raise ConfigError(f"--against: {against!r}: there is one run, and nothing to compare it with")
        return single_page(members[0].run)
    for member in members:
        with reading(member.run.path):
            member.run.read()
    with reading(paths[0]):
        return several_page(folders, distinguish(members), against)


def several_page(
    folders: Sequence[FolderContent], members: Sequence[Member], against: str | None = None
) -> Page:
    """The page about several runs. Args: against: as of `comparisons`.

    Raises:
        ConfigError: As of `comparisons`.
        DamagedError: A file of a run cannot be read.
    """
    shown: list[Section] = [
        summary(members),
        *(Section(one.heading, one.tables) for one in folders),
        Section("The protocol over seeds", over_seeds([table for one in folders for table in one.tables])),
        results(members),
        over_rounds(members),
        by_domain(members),
        Section(PAIRED, [grid] if (grid := comparisons(members, against)) else []),
        fairness(members),
        cost(members),
        single.configs([m.run for m in members], [m.name for m in members]),
        _commands(folders, members),
        single.glossary(),
    ]
    chapters = []
    if len(members) <= MOST_CHAPTERS:
        chapters = [Chapter(name=m.name, sections=sections(m.run)) for m in members]
    titles = dict.fromkeys(one.title for one in folders)
    if len(titles) > 1:
        methods = dict.fromkeys(m.method for m in members)
        titles = methods if len(methods) <= MOST_IN_TITLE else {f"{len(methods)} methods": None}
    return Page(
        title=", ".join(titles),
        subtitle=f"{len(members)} runs; {', '.join(_places(members))}",
        sections=[section for section in shown if section.parts],
        chapters=chapters,
        facts=[single.facts(m.run, m.name) for m in members],
    )


def _places(members: Sequence[Member]) -> list[str]:
    """Data sets and models of the runs."""
    data = dict.fromkeys(m.run.data for m in members)
    models = dict.fromkeys(str(m.run.config.get("model", {}).get("name")) for m in members)
    return [*data, *models]


def _commands(folders: Sequence[FolderContent], members: Sequence[Member]) -> Section:
    """Commands that repeat all runs, and the environment of each."""
    whole = [one.repeat for one in folders if one.repeat]
    parts: list[Part] = []
    if whole:
        parts.append(Sentences(title="One command", code=whole))
    made = dict.fromkeys(command for m in members for command in m.run.commands)
    if made:
        parts.append(Sentences(title="Commands with which it was made", code=list(made)))
    if len(members) > MOST_CHAPTERS:
        sentence = "There are too many runs to show each in detail here; this shows one of them:"
        code = [f"python -m rayfed.report {shlex.quote(str(members[0].run.path))}"]
        parts.append(Sentences(title="A single run", sentences=[sentence], code=code))
    parts.append(single.environment([m.run for m in members], [m.name for m in members]))
    return Section("Repeat it", parts)
