"""A reproduce job: the cells of a paper's table that are to be run, with configs, folders and scores.

Cells share data, partitions and models, and divide the cluster between them.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayfed.config import papers
from rayfed.config.compose import ELSE
from rayfed.config.schema import Config, changes, config_changes
from rayfed.engine.built_once import Shared
from rayfed.errors import ConfigError, shown, unknown
from rayfed.experiment.equal_steps import batches_of, passes, with_passes
from rayfed.experiment.experiment import Experiment
from rayfed.experiment.plan import Plan, make_plan
from rayfed.record.readers import read_json, read_yaml
from rayfed.reproduce.cell_scores import READERS
from rayfed.user_files import parse_value, user_path

MANIFEST = "job.json"
CELLS = "cells"
MOST_SEEDS = 1000
METHOD = ("algorithm", "server", "local", "server.name", "local.name")
"""Keys that say which method a row is."""
KIND = "job"
"""The kind of a job's folder, in its marker."""

EQUAL = "equal_steps"
"""Override of a job: rows that would train less than another one of their setting make more passes."""

OWN_KEYS = {
    "experiment": "give the name of the table first, such as fedgcr/table5",
    "row": "choose rows with --cells ROW",
    "setting": "choose settings with --cells @SETTING",
    "seed": "choose the number of seeds with --seeds N",
    "compare": "the rows of the table are what is compared",
    "overwrite": "a job never removes a run; choose another output",
}
"""Keys that a job sets itself, and what to write instead."""


@dataclass(frozen=True, kw_only=True)
class JobCell:
    """One run of a job.

    Attributes:
        row: Name of the row.
        setting: Name of the setting.
        seed: Seed.
        name: Name of its folder.
        path: Folder of its run.
        config: Its config.
    """

    row: str
    setting: str
    seed: int
    name: str
    path: Path
    config: Config

    @property
    def record(self) -> Path:
        """File that says that the cell is finished, with the digest of its tensors and its seconds."""
        return self.path.with_name(f"{self.name}.json")


@dataclass(frozen=True, kw_only=True)
class TableJob:
    """A checked job.

    Attributes:
        table: The table.
        scale: `paper` or `mini`.
        overrides: Overrides of every cell.
        path: Folder of the job.
        rows: Names of the rows, in the order of the table.
        settings: Names of the settings.
        seeds: Seeds of each cell.
        cells: All runs, those of the first seed first.
    """

    table: papers.PaperTable
    scale: str
    overrides: tuple[str, ...]
    path: Path
    rows: tuple[str, ...]
    settings: tuple[str, ...]
    seeds: tuple[int, ...]
    cells: tuple[JobCell, ...]

    @property
    def manifest(self) -> dict[str, Any]:
        """Content of `job.json`."""
        return {"experiment": self.table.name, "scale": self.scale, "overrides": list(self.overrides)}


def make_job(
    experiment: str,
    scale: str = papers.PAPER,
    seeds: int | None = None,
    chosen: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> TableJob:
    """Check what is asked for, and compose the config of every cell; nothing is written.

    Args:
        experiment: Name of the table, such as fedgcr/table5.
        scale: `paper` or `mini`.
        seeds: Number of seeds; None: those of the table.
        chosen: `ROW`, `@SETTING` or `ROW@SETTING`; none: all cells.
        overrides: Overrides of every cell; `output` is the folder of the job.

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
    own, output = _split_overrides(overrides)
    equal, of_cells = _equal_steps(own)
    path = user_path(output, "output") if output else Path("runs") / _folder_name(table, scale, own)
    count = list(table.seeds)[:seeds]
    while len(count) < (seeds or 0):
        count.append(max(count) + 1)
    pairs = _pairs(table, scale, chosen)
    _check_methods(table, pairs, own)
    cells = tuple(
        _cell(table, scale, row, setting, seed, of_cells, path) for seed in count for row, setting in pairs
    )
    if equal:
        cells = _trained_equally(cells)
    if len({cell.name for cell in cells}) < len(cells):
        raise ConfigError(f"{experiment}: two of its rows or settings differ in signs only; rename one")
    rows = dict.fromkeys(row for row, _ in pairs)
    settings = dict.fromkeys(setting for _, setting in pairs)
    return TableJob(
        table=table,
        scale=scale,
        overrides=own,
        path=path,
        rows=tuple(name for name in table.rows if name in rows),
        settings=tuple(name for name in table.scaled_settings(scale) if name in settings),
        seeds=tuple(count),
        cells=cells,
    )


def check_same(job: TableJob) -> None:
    """Check that the folder of a job that is continued belongs to the same job.

    Raises:
        ConfigError: It holds another job, or a run in it began with another config.
    """
    if not (job.path / MANIFEST).exists():
        return  # its command was killed before it ran anything
    before = read_json(job.path / MANIFEST, dict)
    for key in ("experiment", "scale"):
        if before.get(key) != job.manifest[key]:
            raise ConfigError(
                f"output: {str(job.path)!r} holds the job of {before.get('experiment')} at "
                f"{before.get('scale')} scale; choose another folder"
            )
    from rayfed.config.schema import to_dict

    for cell in job.cells:
        if (file := cell.path / "config.yaml").exists():
            for key, old, new in config_changes(read_yaml(file), to_dict(cell.config)):
                raise ConfigError(
                    f"{key}: {shown(new)} would change the result of {cell.path}, which began with "
                    f"{shown(old)}; choose another output, or leave it out"
                )


def _table(experiment: str) -> papers.PaperTable:
    from rayfed.config.compose import folder

    found = papers.tables(folder())
    name, scale = papers.split_scale(experiment)
    if scale == papers.MINI:
        raise ConfigError(f"{experiment}: write {name} --scale mini")
    if name not in found:
        raise ConfigError(unknown("table", experiment, found) + ELSE["experiment"])
    return found[name]


def _split_overrides(overrides: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Overrides of the cells in order of their keys, and the folder of the job."""
    output = ""
    own = []
    for text in overrides:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise ConfigError(f"{text!r} is not an override; write key=value, or --cells ROW for a row")
        if key in OWN_KEYS:
            raise ConfigError(f"{key}: a job sets it for each of its cells; {OWN_KEYS[key]}")
        if key == "output":
            output = value
        else:
            own.append(f"{key}={value}")
    return tuple(sorted(own)), output


def _equal_steps(overrides: Sequence[str]) -> tuple[bool, tuple[str, ...]]:
    """Tell whether all rows train equally often (`equal_steps=true`), and the overrides of the cells."""
    mine = [text for text in overrides if text.startswith(f"{EQUAL}=")]
    wanted = [parse_value(EQUAL, text.partition("=")[2]) for text in mine]
    if not all(isinstance(value, bool) for value in wanted):
        raise ConfigError(f"{EQUAL}: {shown(wanted[-1])} is neither true nor false")
    return wanted[-1:] == [True], tuple(text for text in overrides if text not in mine)


def _trained_equally(cells: Sequence[JobCell]) -> tuple[JobCell, ...]:
    """The cells, with more passes where another row of their setting trains more often.

    Rows are compared with the first seed; the other seeds train by the same numbers of passes.
    """
    plans = Plans()
    first = [cell for cell in cells if cell.seed == cells[0].seed]
    factors: dict[tuple[str, str], int] = {}
    for setting in dict.fromkeys(cell.setting for cell in first):
        mine = {cell.row: batches_of(plans.of(cell).setups) for cell in first if cell.setting == setting}
        factors |= {(setting, row): factor for row, factor in passes(mine).items()}
    return tuple(
        replace(cell, config=with_passes(cell.config, cell.row, factors[cell.setting, cell.row]))
        for cell in cells
    )


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


def _cell(
    table: papers.PaperTable,
    scale: str,
    row: str,
    setting: str,
    seed: int,
    overrides: Sequence[str],
    path: Path,
) -> JobCell:
    from rayfed.config.schema import compatible_parts

    experiment = table.name if scale == papers.PAPER else f"{table.name}/{scale}"
    chosen = (f"experiment={experiment}", f"row={row}", f"setting={setting}", f"seed={seed}", "compare=[]")
    given = {text.partition("=")[0] for text in overrides}
    figures = () if "figures" in given else ("figures=false",)
    config = Experiment.from_overrides([*chosen, *figures, *overrides]).config()
    compatible_parts(config)
    if config.protocol not in READERS:
        raise ConfigError(
            f"protocol: {config.protocol!r} has its own table, but a cell of a paper's table has one "
            f"number; leave it out, or run the cell with rayfed.run"
        )
    name = f"{_slug(setting)}-{_slug(row)}-seed{seed}"
    folder = path / CELLS / name
    return JobCell(
        row=row,
        setting=setting,
        seed=seed,
        name=name,
        path=folder,
        config=replace(config, output=str(folder), overwrite=False),
    )


def _slug(name: str) -> str:
    """A name of a folder: lower-case letters, digits and hyphens.

    >>> _slug("FAA 1/4, ordinary training"), _slug("dif1 T'=3")
    ('faa-1-4-ordinary-training', 'dif1-t-3')
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


MOST_KEPT = 2
"""Pairs of a setting and a seed whose data and models are kept in memory for other cells."""


class Plans:
    """Prepares cells one at a time; those of one setting and seed share what they have in common.

    Attributes:
        alone: Held while a cell is prepared, and while files of the job are written, as several threads run.
    """

    def __init__(self) -> None:
        self.alone = threading.RLock()
        self._shared: OrderedDict[tuple[str, int], Shared] = OrderedDict()

    def of(self, cell: JobCell) -> Plan:
        """The prepared cell.

        Raises:
            ConfigError: It cannot be run.
        """
        with self.alone:
            key = (cell.setting, cell.seed)
            shared = self._shared.setdefault(key, Shared())
            self._shared.move_to_end(key)
            if len(self._shared) > MOST_KEPT:
                self._shared.popitem(last=False)
            return make_plan(cell.config, cell.path, shared)


def runs_of(cell: JobCell) -> list[Path]:
    """Folders of the runs of a finished cell: its own one, or those of the domains that are held out."""
    if cell.config.protocol == "leave_one_out":
        return [file.parent for file in sorted(cell.path.glob("*/partition.parquet"))]
    return [cell.path]
