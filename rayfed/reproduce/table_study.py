"""The study of a paper's table: its rows, settings and seeds, with their configs, and its folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rayfed.columns import Unit
from rayfed.config import papers
from rayfed.config.compose import ELSE
from rayfed.config.config_changes import changes
from rayfed.config.schema import Request
from rayfed.engine.setup import Setup
from rayfed.errors import ConfigError, shown, unknown
from rayfed.executors.kinds.base import kind_of
from rayfed.experiment.equal_work import checked_unit
from rayfed.experiment.experiment import Experiment
from rayfed.experiment.plan import prepared, protocol_runs
from rayfed.experiment.study.cells import Study
from rayfed.experiment.study.coordinates import PART, Key
from rayfed.experiment.study.described import Fixed
from rayfed.experiment.study.equal_cells import with_equal_work
from rayfed.experiment.study.run_cell import CommonParts
from rayfed.user_files import parse_value, user_path

COORDINATES = ("method", "setting", "seed")
"""Coordinates of a cell of a table; a row is a method. Each domain that is held out is a `part`."""

MOST_SEEDS = 1000
METHOD = ("algorithm", "server", "local", "server.name", "local.name")
"""Keys that say which method a row is."""

EQUAL, AT_ONCE = "equal", "at_once"
"""Overrides of the whole: rows that would train less than another one of their setting run more rounds; and
the number of cells side by side."""

SCORED = ("single", "leave_one_out")
"""Protocols that give one number for each measure of a table."""

OWN_KEYS = {
    "experiment": "give the name of the table first, such as fedgcr/table5",
    "row": "choose rows with --cells ROW",
    "setting": "choose settings with --cells @SETTING",
    "seed": "choose the number of seeds with --seeds N",
    "compare": "the rows of the table are what is compared",
    "overwrite": "a study is never replaced; choose another output",
    "stop": "the paper's numbers are those of whole runs; write rounds=N for shorter ones",
}
"""Keys that the table sets itself, and what to write instead."""


class TableCell(NamedTuple):
    """A cell of a paper's table: one run, or one for each domain that is held out."""

    row: str
    setting: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class TableStudy:
    """A table of a paper, or a part of it, that is to be run.

    Attributes:
        table: The table.
        scale: `paper` or `mini`.
        overrides: Overrides of every cell.
        path: Folder of the study.
        at_once: Number of cells side by side.
        rows: Names of the rows, in the order of the table.
        settings: Names of the settings.
        seeds: Seeds of each cell.
        configs: The experiment of each cell, those of the first seed first.
        given: Keys that are set by the overrides.
    """

    table: papers.PaperTable
    scale: str
    overrides: tuple[str, ...]
    path: Path
    at_once: int | Literal["auto"]
    rows: tuple[str, ...]
    settings: tuple[str, ...]
    seeds: tuple[int, ...]
    configs: Mapping[TableCell, Request]
    given: frozenset[str] = frozenset()

    @cached_property
    def study(self) -> Study:
        """The study: its cells by method (the row), setting and seed."""
        given = dict.fromkeys(self.given)
        cells = [((c.row, c.setting, c.seed), Fixed(config, given)) for c, config in self.configs.items()]
        return Study(cells, names=COORDINATES)

    @property
    def first(self) -> Request:
        """The experiment of the first cell."""
        return next(iter(self.configs.values()))


def table_study(
    experiment: str,
    scale: str = papers.PAPER,
    seeds: int | None = None,
    chosen: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> TableStudy:
    """Check what is asked for, and compose the config of every cell; nothing is written.

    Args:
        experiment: Name of the table, such as fedgcr/table5.
        scale: `paper` or `mini`.
        seeds: Number of seeds; None: those of the table.
        chosen: `ROW`, `@SETTING` or `ROW@SETTING`; none: all cells.
        overrides: Overrides of every cell; `output` is the folder of the study, and `at_once` the number of
            cells side by side, by default as many as Ray has room for, and one with `cluster=inline`.

    Raises:
        ConfigError: There is no such table, cell or key, or a cell has no valid config.
    """
    table = _table(experiment)
    if scale == papers.MINI and not table.small:
        raise ConfigError(f"--scale: {experiment} has no mini scale; leave it out, and set data.root")
    if seeds is not None and seeds < 1:
        raise ConfigError(f"--seeds: {seeds} is not a number of seeds; write --seeds 1 or more")
    if seeds is not None and seeds > MOST_SEEDS:
        raise ConfigError(f"--seeds: {seeds} is more than {MOST_SEEDS} seeds; write --seeds 3, for example")
    own, of_whole = _split_overrides(overrides)
    equal, of_cells = _equal(own)
    output = of_whole.get("output", "")
    path = user_path(output, "output") if output else Path("runs") / _folder_name(table, scale, own)
    count = list(table.seeds)[:seeds]
    while len(count) < (seeds or 0):
        count.append(max(count) + 1)
    pairs = _pairs(table, scale, chosen)
    _check_methods(table, pairs, own)
    configs = {
        TableCell(row, setting, seed): _config(table, scale, TableCell(row, setting, seed), of_cells)
        for seed in count
        for row, setting in pairs
    }
    if equal and len({cell.row for cell in configs}) > 1:
        cells: dict[Key, Request] = {(*cell,): config for cell, config in configs.items()}
        longer = with_equal_work(cells, COORDINATES, (), equal, CommonParts(), setups_of)
        configs = {cell: longer[cell] for cell in configs}
    shares_cluster = kind_of(next(iter(configs.values())).cluster).needs_cluster
    rows = dict.fromkeys(row for row, _ in pairs)
    settings = dict.fromkeys(setting for _, setting in pairs)
    return TableStudy(
        table=table,
        scale=scale,
        overrides=own,
        path=path,
        at_once=_number_at_once(of_whole.get(AT_ONCE, "auto" if shares_cluster else "1")),
        rows=tuple(name for name in table.rows if name in rows),
        settings=tuple(name for name in table.scaled_settings(scale) if name in settings),
        seeds=tuple(count),
        configs=configs,
        given=frozenset(text.partition("=")[0] for text in of_cells),
    )


def cell_of(key: Key, names: Sequence[str]) -> TableCell:
    """The cell of the table that a cell of its study belongs to. Args: names: those of the coordinates."""
    at: Mapping[str, Any] = dict(zip(names, key, strict=True))
    return TableCell(*(at[name] for name in COORDINATES))


def part_of(key: Key, names: Sequence[str]) -> str:
    """The held-out domain of a cell of the study; empty: none is held out in turn."""
    return str(key[names.index(PART)]) if PART in names else ""


def setups_of(config: Request, common: CommonParts) -> tuple[Setup, ...]:
    """The prepared run of a cell, or those of all domains that are held out.

    Raises:
        ConfigError: It cannot be run.
    """
    shared = common.of(config)
    if config.protocol == "single":
        return (prepared(config.alone(), shared),)
    return tuple(prepared(run, shared) for run in protocol_runs(config, shared).values())


def _table(experiment: str) -> papers.PaperTable:
    from rayfed.config.compose import folder

    found = papers.tables(folder())
    name, scale = papers.split_scale(experiment)
    if scale == papers.MINI:
        raise ConfigError(f"{experiment}: write {name} --scale mini")
    if name not in found:
        raise ConfigError(unknown("table", experiment, found) + ELSE["experiment"])
    return found[name]


def _split_overrides(overrides: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Overrides of the cells in order of their keys, and those of the whole by key."""
    whole: dict[str, str] = {}
    own = []
    for text in overrides:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise ConfigError(f"{text!r} is not an override; write key=value, or --cells ROW for a row")
        if key in OWN_KEYS:
            raise ConfigError(f"{key}: a table sets it for each of its cells; {OWN_KEYS[key]}")
        if key in ("output", AT_ONCE):
            whole[key] = value
        else:
            own.append(f"{key}={value}")
    return tuple(sorted(own)), whole


def _number_at_once(text: str) -> int | Literal["auto"]:
    """A number of cells side by side, as it was written."""
    if text == "auto":
        return "auto"
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{AT_ONCE}: {shown(text)} is neither a number of 1 or more nor auto")
    return int(text)


def _equal(overrides: Sequence[str]) -> tuple[Unit | None, tuple[str, ...]]:
    """The unit of `equal=examples`, for the rows of a setting, and the overrides of the cells."""
    mine = [text for text in overrides if text.startswith(f"{EQUAL}=")]
    wanted = [parse_value(EQUAL, text.partition("=")[2]) for text in mine]
    rest = tuple(text for text in overrides if text not in mine)
    return checked_unit(wanted[-1] if wanted else None), rest


def _check_methods(
    table: papers.PaperTable, pairs: Sequence[tuple[str, str]], overrides: Sequence[str]
) -> None:
    """Refuse overrides that would put another method, or a variant of it, next to a published number."""
    for key in (text.partition("=")[0] for text in overrides):
        rows = [row for row, _ in pairs if key in METHOD or (key in table.rows[row] and _is_of_method(key))]
        if rows:
            raise ConfigError(
                f"{key}: row {rows[0]!r} of {table.name} sets its method, and the published numbers are "
                f"those of that method; choose rows with --cells ROW, or use rayfed run"
            )


def _is_of_method(key: str) -> bool:
    return key.startswith(("server.", "local."))


def _folder_name(table: papers.PaperTable, scale: str, overrides: Sequence[str]) -> str:
    """Name of the default folder: the same for the same results."""
    name = f"reproduce-{_slug(table.name)}-{scale}"
    keys = [text for text in overrides if not is_harmless(text.partition("=")[0])]
    return f"{name}-{hashlib.sha256(json.dumps(keys).encode()).hexdigest()[:8]}" if keys else name


def is_harmless(key: str) -> bool:
    """Whether a key of the config changes no result."""
    return not any(changes(None, "another value", key))


def _pairs(table: papers.PaperTable, scale: str, chosen: Sequence[str]) -> list[tuple[str, str]]:
    """Rows and settings of the cells, setting by setting."""
    settings: Mapping[str, Any] = table.scaled_settings(scale)
    every = [(row, setting) for setting in settings for row in table.rows]
    if not chosen:
        return every
    wanted = set()
    for text in chosen:
        row, _, setting = text.partition("@")
        if not row and not setting:
            raise ConfigError(f"--cells: {text!r} names no cell; write ROW, @SETTING or ROW@SETTING")
        if row and row not in table.rows:
            raise ConfigError(unknown("--cells", row, table.rows))
        if setting and setting not in settings:
            raise ConfigError(unknown("--cells", f"@{setting}", [f"@{name}" for name in settings]))
        wanted |= {pair for pair in every if row in ("", pair[0]) and setting in ("", pair[1])}
    return [pair for pair in every if pair in wanted]


def _config(table: papers.PaperTable, scale: str, cell: TableCell, overrides: Sequence[str]) -> Request:
    """The experiment of a cell."""
    from rayfed.config.schema import compatible_parts

    experiment = table.name if scale == papers.PAPER else f"{table.name}/{scale}"
    chosen = (f"experiment={experiment}", f"row={cell.row}", f"setting={cell.setting}", f"seed={cell.seed}")
    config = Experiment.from_overrides([*chosen, "compare=[]", *overrides]).config()
    compatible_parts(config)
    if config.protocol not in SCORED:
        raise ConfigError(
            f"protocol: {config.protocol!r} has its own table, but a cell of a paper's table has one "
            f"number; leave it out, or run the cell with rayfed.run"
        )
    return config


def _slug(name: str) -> str:
    """A name of a folder: lower-case letters, digits and hyphens.

    >>> _slug("fedgcr/table5")
    'fedgcr-table5'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
