"""The tables of a protocol on the page about its runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from rayfed.config.generalization import folder_name
from rayfed.config.schema import load_run
from rayfed.errors import ConfigError
from rayfed.record.folder import TENSORS
from rayfed.record.readers import read_yaml
from rayfed.report.leave_one_out import methods_in
from rayfed.report.page.parts import Cell, Column, Grid
from rayfed.report.protocols import TABLES
from rayfed.report.table import Table

SEED = re.compile(r", seed \d+")
"""What differs between the titles of tables of the same experiment with several seeds."""


def protocol_tables(path: Path) -> list[Grid]:
    """The tables of report.md, from the finished runs of a protocol; none for the folder of anything else.

    The runs are in the order of their names, in which numbers count as such, that on the data set of the
    clients first.
    """
    if str(read_yaml(path / "config.yaml").get("protocol")) not in TABLES:
        return []
    try:
        config = load_run(path)
    except ConfigError:  # such as a method that is not installed here; its runs are shown nevertheless
        return []
    runs = [file.parent for file in path.glob("*/config.yaml")]
    done = [run for run in runs if all((own / TENSORS).is_file() for _, own in methods_in(config, run))]
    first = folder_name(config.data.name)
    folders = {run.name: run for run in sorted(done, key=lambda run: (run.name != first, _natural(run.name)))}
    return [grid_of(table) for table in TABLES[config.protocol](config, folders).parts] if folders else []


def _natural(name: str) -> list[tuple[float, str]]:
    """What names are sorted by, so that numbers in them are in order."""
    parts = re.split(r"(\d+(?:\.\d+)?)", name)
    return [(float(part), "") if i % 2 else (0.0, part) for i, part in enumerate(parts)]


def grid_of(table: Table) -> Grid:
    """A table of text as one that can be sorted; columns in which all words are numbers hold numbers."""
    places = range(len(table.columns))
    numeric = [all(_number(row[i]) is not None for row in table.rows if row[i]) for i in places]
    columns = [
        Column(name, "number" if own and i else "text")
        for i, (name, own) in enumerate(zip(table.columns, numeric, strict=True))
    ]
    rows: list[Sequence[Cell]] = [
        [
            _number(text) if column.kind == "number" else text
            for text, column in zip(row, columns, strict=True)
        ]
        for row in table.rows
    ]
    return Grid(title=table.title, caption=" ".join(table.notes), columns=columns, rows=rows)


def over_seeds(tables: Sequence[Grid]) -> list[Grid]:
    """Means over seeds of tables of protocols, with sample standard deviations.

    Args:
        tables: Tables of several folders.

    Returns:
        One table for all those whose titles differ in the seed alone; none where a seed occurs twice. Rows
        are those whose words are the same in two or more tables; the numbers of rounds are left out.
    """
    groups: dict[tuple[str, ...], list[Grid]] = {}
    for table in tables:
        kinds = (f"{column.name} {column.kind}" for column in table.columns)
        groups.setdefault((SEED.sub("", table.title), *kinds), []).append(table)
    several = {key: own for key, own in groups.items() if len({t.title for t in own}) == len(own) > 1}
    found = [_mean_of(title, own) for (title, *_), own in several.items()]
    return [grid for grid in found if grid.rows]


def _mean_of(title: str, tables: Sequence[Grid]) -> Grid:
    """Mean and deviation of the numbers in rows with the same words."""
    given = list(enumerate(tables[0].columns))
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
    return Grid(title=f"{title}, mean over seeds", caption=caption, columns=columns, rows=rows)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
