"""Finds the runs in the folders that a page is about: runs, comparisons, folds, sweeps, reproduced tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayfed.config.variants import PROTOCOLS
from rayfed.documents import check_run_folder
from rayfed.errors import ConfigError
from rayfed.record.layout import COMPARE
from rayfed.record.readers import read_json, read_parquet, read_yaml, reading
from rayfed.report.page.parts import Cell, Column, Grid, Kind
from rayfed.report.page.protocol import protocol_tables
from rayfed.report.page.run import PageRun
from rayfed.report.page.settings import NOT_COMPARED, again, flat, word

SWEEP = "sweep.yaml"
"""A folder with this file is that of a sweep."""
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
    """

    run: PageRun
    method: str
    setting: str = ""
    averaged: bool = True

    @property
    def group(self) -> str:
        """Method and setting: what the runs share that differ in their seeds alone."""
        return f"{self.method}, {self.setting}" if self.setting else self.method

    @property
    def name(self) -> str:
        return f"{self.group}, seed {self.run.seed}"


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a folder holds.

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
    tables: Sequence[Grid] = ()
    repeat: str = ""


def find(path: Path) -> Found:
    """The runs in a folder.

    Raises:
        ConfigError: It holds no run, no sweep and no reproduced table.
        DamagedError: A file in it cannot be read.
    """
    if (path / REPRODUCTION).exists():
        return _reproduction(path)
    if (path / SWEEP).exists():
        return _sweep(path)
    check_run_folder(path)
    members = list(_members(path))
    first = members[0]
    if first.run.by_validation:
        title = f"{first.run.method} on {first.run.data}, each domain held out in turn"
    else:
        title = first.run.tables.name
    heading, tables = "The protocol", protocol_tables(path)
    return Found(
        title=title, members=members, heading=heading, tables=tables, repeat=again(path / "config.yaml")
    )


def _members(path: Path, by_validation: bool = False) -> Iterator[Member]:
    """The runs in the folder of a command `rayfed.run`: one, the compared ones, or those of all folds.

    Raises:
        ConfigError: It holds no run.
    """
    check_run_folder(path)
    with reading(path, f"{path}: holds no run (config.yaml is not that of a run)"):
        config = read_yaml(path / "config.yaml")
        protocol = PROTOCOLS.get(str(config.get("protocol")))
    if protocol is None:
        for folder in (path, *sorted(file.parent for file in (path / COMPARE).glob("*/config.yaml"))):
            run = PageRun(folder, by_validation)
            yield Member(run=run, method=run.method)
        return
    inside = [file.parent for file in sorted(path.glob("*/config.yaml"))]
    if not inside:
        raise ConfigError(f"{path}: holds no run (none of its folders has one)")
    for folder in inside:
        for member in _members(folder, protocol.by_validation):
            setting = protocol.setting.format(name=folder.name)
            yield replace(member, setting=setting, averaged=protocol.by_validation)


def _sweep(path: Path) -> Found:
    """The trials of a sweep, each with a run for each seed."""
    with reading(path / SWEEP):
        tree = read_yaml(path / SWEEP)["sweep"]
        name, space = str(tree["name"]), list(tree["space"])
    members = []
    for folder in sorted((path / "runs").glob("*/*/config.yaml")):
        run = PageRun(folder.parent)
        trial = int(folder.parent.parent.name) if folder.parent.parent.name.isdigit() else 0
        members.append(Member(run=run, method=run.method, setting=f"trial {trial}"))
    if not members:
        raise ConfigError(f"{path}: none of the sweep's trials has begun; there is nothing to report yet")
    tables = [_trials(path, space)] if (path / "trials.parquet").exists() else []
    best = path / "best.yaml"
    repeat = again(best) if best.exists() else ""
    return Found(title=f"Sweep {name}", members=members, heading="Trials", tables=tables, repeat=repeat)


def _trials(path: Path, space: Sequence[str]) -> Grid:
    """The table of all trials: their state, objectives and hyperparameters."""
    table = read_parquet(path / "trials.parquet").to_pylist()
    names = list(table[0]) if table else []
    names = names[: names.index("sha256")] if "sha256" in names else names
    names += ["error"] if "error" not in names and any(row.get("error") for row in table) else []
    kinds: dict[str, Kind] = {"trial": "count", "rounds": "count", "state": "text", "error": "text"}
    columns = []
    for name in names:
        numbers = all(isinstance(row[name], int | float | None) for row in table)
        columns.append(Column(name, kinds.get(name, "number" if numbers else "text")))
    rows: list[list[Cell]] = [[_cell(row[name]) for name in names] for row in table]
    caption = f"Searched were {', '.join(space)}."
    return Grid(title="Trials", caption=caption, columns=columns, rows=rows, filters={"state": ""})


def _cell(value: Any) -> Cell:
    return value if isinstance(value, str | int | float) or value is None else word(value)


def _reproduction(path: Path) -> Found:
    """The cells of a reproduced table, with ours, the paper's numbers and the verdicts."""
    file = path / REPRODUCTION
    tree = read_json(file, dict)
    with reading(file):
        title = f"{tree['title']} ({tree['experiment']}, {tree['scale']})"
        cells = [(c["row"], c["setting"], path / c["path"]) for c in tree["cells"]]
        tables = [_values(tree), _claims(tree)]
        repeat = f"python -m rayfed.reproduce {tree['experiment']} --scale {tree['scale']}"
    members = []
    for row, setting, folder in cells:
        if (folder / "config.yaml").exists():
            for member in _members(folder):
                parts = (part for part in (setting, member.setting) if part)
                members.append(replace(member, method=row, setting=", ".join(parts)))
    if not members:
        raise ConfigError(f"{path}: none of the table's runs has begun; there is nothing to report yet")
    heading = "The paper's table"
    return Found(title=title, members=members, heading=heading, tables=tables, repeat=repeat)


def _values(tree: Mapping[str, Any]) -> Grid:
    """Ours beside the paper's numbers. `reproduction.json` holds them as they are shown."""
    columns = [Column("row"), Column("setting"), Column("measure"), Column("seeds", "count")]
    columns += [Column(name, "number") for name in ("ours", "deviation", "paper", "difference")]
    rows: list[list[Cell]] = [
        [v[key] for key in ("row", "setting", "measure", "seeds", "mean", "sd", "paper", "difference")]
        for v in tree["values"]
    ]
    filters = {"setting": "", "measure": ""}
    rule = str(tree["selection"]).rstrip(".")
    caption = f"Mean over seeds, with the sample standard deviation; of each run is reported: {rule}."
    return Grid(
        title="Ours and the paper's numbers", caption=caption, columns=columns, rows=rows, filters=filters
    )


def _claims(tree: Mapping[str, Any]) -> Grid:
    """The orderings in the paper's numbers and what our runs say about them."""
    columns = [Column("better"), Column("worse"), Column("setting"), Column("measure")]
    columns += [Column("paper's difference", "number"), Column("our difference", "number")]
    columns += [Column("seeds", "count"), Column("p", "p"), Column("verdict")]
    keys = (
        "better",
        "worse",
        "setting",
        "measure",
        "paper_difference",
        "difference",
        "seeds",
        "p",
        "verdict",
    )
    rows: list[list[Cell]] = [[claim[key] for key in keys] for claim in tree["claims"]]
    caption = "p: two-sided paired t-test over seeds."
    filters = {"verdict": "", "setting": "", "measure": ""}
    return Grid(title="Orderings of the paper", caption=caption, columns=columns, rows=rows, filters=filters)


def told_apart(members: Sequence[Member]) -> list[Member]:
    """The same members, such that no two share method, setting and seed.

    Settings in which they differ become part of the setting; where none differs, the name of the folder.
    """
    groups: dict[tuple[str, str, int], list[Member]] = {}
    for member in members:
        groups.setdefault((member.method, member.setting, member.run.seed), []).append(member)
    keys: set[str] = set()
    for group in groups.values():
        found = [dict(flat(member.run.config)) for member in group]
        keys |= {
            key
            for key in found[0]
            if not key.startswith(SIDE) and len({word(one.get(key)) for one in found}) > 1
        }
    named = [_with(member, sorted(keys)) for member in members]
    counts = [(m.method, m.setting, m.run.seed) for m in named]
    return [
        member if counts.count(key) == 1 else _extended(member, str(member.run.path))
        for member, key in zip(named, counts, strict=True)
    ]


def _with(member: Member, keys: Sequence[str]) -> Member:
    config = dict(flat(member.run.config))
    return _extended(member, ", ".join(f"{key}={word(config.get(key))}" for key in keys))


def _extended(member: Member, words: str) -> Member:
    parts = (part for part in (member.setting, words) if part)
    return replace(member, setting=", ".join(parts))
