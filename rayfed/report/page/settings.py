"""Sections about how runs were made: config, environment, and the commands that repeat them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rayfed.report.document import WORDS
from rayfed.report.page.method import other_tables
from rayfed.report.page.parts import Cell, Column, Grid, Part, Section, Text
from rayfed.report.page.run import PageRun

NOT_COMPARED = ("output", "overwrite", "compare", "report", "figures")
"""Keys of the config that say nothing about what was run."""


def flat(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Keys of a config with dots, and their values.

    >>> dict(flat({"rounds": 3, "train": {"lr": 0.1}}))
    {'rounds': 3, 'train.lr': 0.1}
    """
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def word(value: Any) -> str:
    """A value of a config as text."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def again(file: Path) -> str:
    """The command that runs a config in a new folder, to be copied."""
    return f"python -m rayfed.run --config {shlex.quote(str(file))} output=NEW"


def repeated(run: PageRun) -> Section:
    """The commands of a run, and one that repeats it exactly."""
    sentences = ["This repeats the run in a new folder; config and seed decide every number of it."]
    if run.digest:
        sentences.append(f"On the same kind of processor its tensors have the digest {run.digest[:16]}.")
    parts: list[Part] = [
        Text(title="One command", sentences=sentences, code=[again(run.path / "config.yaml")])
    ]
    if run.commands:
        parts.append(Text(title="Commands with which it was made", code=run.commands))
    parts.append(environment([run]))
    if tables := other_tables(run):
        parts.append(tables)
    return Section("Repeat it", parts)


def environment(runs: Sequence[PageRun], names: Sequence[str] = ("value",)) -> Grid:
    """Versions and digests of runs, a column for each; what differs is highlighted."""
    facts = [dict(flat({k: v for k, v in run.environment.items() if k != "commands"})) for run in runs]
    return _side_by_side("Environment", "fact", facts, names)


def config(run: PageRun) -> Section:
    """Every setting of a run."""
    rows: list[list[Cell]] = [[key, word(value)] for key, value in flat(run.config)]
    grid = Grid(title="All settings", columns=[Column("key"), Column("value")], rows=rows, folded=True)
    return Section("Config", [grid])


def configs(runs: Sequence[PageRun], names: Sequence[str]) -> Section:
    """The settings that differ between runs, highlighted, and those that do not."""
    found = [dict(flat(run.config)) for run in runs]
    keys = list(dict.fromkeys(key for one in found for key in one))
    different = [key for key in keys if differs(found, key)]
    same = [key for key in keys if key not in different and key not in NOT_COMPARED]
    shown = [{key: one[key] for key in different if key in one} for one in found]
    parts: list[Part] = [_side_by_side("Settings that differ", "key", shown, names)]
    rows: list[list[Cell]] = [[key, word(found[0].get(key))] for key in same]
    columns = [Column("key"), Column("value")]
    parts.append(Grid(title="Settings that all runs share", columns=columns, rows=rows, folded=True))
    return Section("Config", parts)


def differs(found: Sequence[Mapping[str, Any]], key: str) -> bool:
    """Whether a key has several values in these flat configs, or is missing in some."""
    if key in NOT_COMPARED:
        return False
    return len({word(one[key]) if key in one else None for one in found}) > 1


def _side_by_side(title: str, what: str, found: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Grid:
    """A row for each key and a column for each run, or with many runs a row for each run."""
    keys = list(dict.fromkeys(key for one in found for key in one))
    marked = frozenset(place for place, key in enumerate(keys) if differs(found, key))
    rows: list[list[Cell]]
    if len(found) <= MOST_COLUMNS:
        rows = [[key, *(word(one.get(key, "")) for one in found)] for key in keys]
        columns = [Column(what), *(Column(name) for name in names)]
        caption = "Highlighted: what differs." if len(found) > 1 else ""
        return Grid(title=title, caption=caption, columns=columns, rows=rows, marked=marked)
    keys = [keys[place] for place in sorted(marked)]
    rows = [[name, *(word(one.get(key, "")) for key in keys)] for name, one in zip(names, found, strict=True)]
    caption = "What differs, a row for each run."
    return Grid(title=title, caption=caption, columns=[Column("run"), *map(Column, keys)], rows=rows)


MOST_COLUMNS = 8
"""Largest number of runs that have a column each."""


def glossary() -> Section:
    """What the words mean."""
    columns = [Column("word"), Column("meaning")]
    rows: list[list[Cell]] = [[name, meaning] for name, meaning in WORDS.items()]
    return Section("Words", [Grid(title="What the words mean", columns=columns, rows=rows, folded=True)])


def facts(run: PageRun, name: str) -> dict[str, Any]:
    """What the file with the numbers says about how a run was made."""
    return {
        "name": name,
        "folder": str(run.path),
        "config": dict(run.config),
        "environment": dict(run.environment),
        "tensors_sha256": run.digest,
        "repeat": again(run.path / "config.yaml"),
    }
