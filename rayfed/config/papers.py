"""Tables and figures of the papers: their rows, settings, seeds and published numbers, read from YAML.

`configs/papers/<paper>.yaml` holds one entry for each table or figure, and `configs/experiment/<paper>/` an
experiment of the same name with everything that all rows share. An entry takes what it leaves out from the
entry that its key `like` names. `experiment=fedgcr/table1` is that experiment at the scale of the paper,
`experiment=fedgcr/table1/mini` the same matrix on data and models that ship with RayFed. `row=NAME` and
`setting=NAME` choose a cell; with `algorithm=NAME` the first row of that algorithm gives the hyperparameters
that the table has for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from rayfed.errors import ConfigError, unknown
from rayfed.user_files import read_file

MINI = "mini"
PAPER = "paper"
FOLDER = "papers"
CHOICE = ("row", "setting")
"""Keys of the command line that choose a cell."""

OWN = ("numbers", "also", "figure")
"""Keys of an entry that another entry never takes over."""

Changes = Mapping[str, Any]
"""Values by config key, and choices by config group."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a table.

    Attributes:
        row: Name of the row.
        setting: Name of the setting.
        seed: Seed of the run.
        overrides: What to write on the command line.
        published: The paper's numbers, in the order of `Table.measures`; None: it prints none.
    """

    row: str
    setting: str
    seed: int
    overrides: tuple[str, ...]
    published: Any


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table or figure of a paper.

    Attributes:
        name: Name of its experiment, such as fedgcr/table1.
        reference: Key of the paper in docs/references.bib.
        where: What it is in the paper, such as "Table 1".
        title: What it shows, in one line.
        measures: Names of the published numbers of a cell. Where a cell has several under the letter of
            each domain, a measure is the last one of a letter, which is their mean.
        scores: What is read from a run for a measure (`rayfed.reproduce.cell_scores`); others cannot be read
            from a run.
        columns: Domains in the order of the paper's columns, by setting; by default that of the data set.
        selection: The round whose scores are reported, and how scores of seeds are combined.
        figure: Command that draws it; empty: it is a table.
        data: Where its data come from.
        seeds: Seeds of every cell.
        common: Changes of every row.
        rows: Changes by name of the row; each row names its algorithm.
        settings: Changes by name of the setting.
        special: Changes of single cells, by setting and row.
        small: Changes of every cell at mini scale, and in `rows` and `settings` those of rows and settings.
        choices: What the paper does not say and we chose, with the place of the reason.
        numbers: Published numbers by setting and row.
    """

    name: str
    reference: str
    where: str
    title: str
    measures: tuple[str, ...] = ()
    scores: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    selection: str = ""
    figure: str = ""
    data: str = ""
    seeds: tuple[int, ...] = (0,)
    common: Changes
    rows: Mapping[str, Changes]
    settings: Mapping[str, Changes]
    special: Mapping[str, Mapping[str, Changes]] = field(default_factory=dict)
    small: Changes
    choices: tuple[str, ...] = ()
    numbers: Mapping[str, Mapping[str, Any]]

    def scaled_settings(self, scale: str) -> Mapping[str, Changes]:
        """The settings at a scale; data that ship with RayFed have fewer domains and data sets to choose."""
        return self.small.get("settings", self.settings) if scale == MINI else self.settings

    def cells(self, scale: str = PAPER) -> Iterator[Cell]:
        """Every run of the table: all rows, settings and seeds.

        Args:
            scale: `paper` or `mini`.
        """
        name = self.name if scale == PAPER else f"{self.name}/{scale}"
        for setting, row, seed in itertools.product(self.scaled_settings(scale), self.rows, self.seeds):
            chosen = (f"experiment={name}", f"row={row}", f"setting={setting}", f"seed={seed}")
            published = self.numbers.get(setting, {}).get(row)
            yield Cell(row=row, setting=setting, seed=seed, overrides=chosen, published=published)

    def row_of(self, row: str | None, algorithm: str) -> str | None:
        """Name of the row to use; None: the table has no row for this algorithm on the table's model.

        Raises:
            ConfigError: There is no such row.
        """
        if row is None:
            rows = self.rows.items()
            found = (n for n, values in rows if values["algorithm"] == algorithm and "model" not in values)
            return next(found, None)
        if row not in self.rows:
            raise ConfigError(unknown("row", row, list(self.rows)))
        return row

    def changes(self, row: str | None, setting: str | None, scale: str) -> dict[str, Any]:
        """Changes of a cell to its experiment; later ones win: common, setting, row, cell, scale.

        Args:
            row: Name of the row; None: an algorithm that has no row in the table.
            setting: Name of the setting; None: the first one.
            scale: `paper` or `mini`.

        Raises:
            ConfigError: There is no such setting.
        """
        settings = self.scaled_settings(scale)
        setting = next(iter(settings)) if setting is None else setting
        if setting not in settings:
            raise ConfigError(unknown("setting", setting, list(settings)))
        found = {**self.common, **settings[setting], **(self.rows[row] if row else {})}
        found |= self.special.get(setting, {}).get(row or "", {})
        if scale == MINI:
            found |= {key: value for key, value in self.small.items() if key not in ("rows", "settings")}
            found |= self.small.get("rows", {}).get(row, {})
        return found


def split_scale(experiment: str) -> tuple[str, str]:
    """Name of the experiment without its scale, and the scale.

    >>> split_scale("fedgcr/table1/mini"), split_scale("fedgcr/table1")
    (('fedgcr/table1', 'mini'), ('fedgcr/table1', 'paper'))
    """
    name, _, last = experiment.rpartition("/")
    return (name, MINI) if last == MINI and name else (experiment, PAPER)


def find(folder: Path, experiment: str) -> PaperTable | None:
    """The table of an experiment; None: it belongs to no paper.

    Args:
        folder: Folder of the config groups.
        experiment: Name of the experiment, with or without its scale.

    Raises:
        ConfigError: The file of the paper cannot be read.
    """
    return tables(folder).get(split_scale(experiment)[0])


@cache
def tables(folder: Path) -> dict[str, PaperTable]:
    """Every table and figure of every paper, by the name of its experiment.

    Args:
        folder: Folder of the config groups.

    Raises:
        ConfigError: A file cannot be read.
    """
    found = {}
    for file in sorted((folder / FOLDER).glob("*.yaml")):
        content = read_file(file, "experiment")
        for name, entry in content["tables"].items():
            reference = entry.get("reference", content["reference"])
            table = _table(f"{file.stem}/{name}", reference, _whole(content, name))
            found[table.name] = table
            for other in entry.get("also", ()):  # its own experiment that has the same rows
                alone = replace(table, settings={"default": {}}, small={}, numbers={})
                found[f"{file.stem}/{other}"] = replace(alone, name=f"{file.stem}/{other}")
    return found


def _whole(paper: Mapping[str, Any], name: str) -> dict[str, Any]:
    """One entry of a file, with what it leaves out taken from its `like`, else from the section `defaults`.

    `like` names another entry. The entry's `choices` come after those, and its `mini` changes single keys; it
    never takes over `OWN`.
    """
    entry = paper["tables"][name]
    base = _whole(paper, entry["like"]) if "like" in entry else paper["defaults"]
    found = {key: value for key, value in base.items() if key not in OWN} | entry
    choices = [*base.get("choices", ()), *entry.get("choices", ())]
    return found | {"choices": choices, MINI: {**base.get(MINI, {}), **entry.get(MINI, {})}}


def _table(name: str, reference: str, entry: Mapping[str, Any]) -> PaperTable:
    """The table of a whole entry."""
    return PaperTable(
        name=name,
        reference=reference,
        where=entry["where"],
        title=entry["title"],
        measures=tuple(entry.get("measures", ())),
        scores=entry.get("scores", {}),
        columns=entry.get("columns", {}),
        selection=entry.get("selection", ""),
        figure=entry.get("figure", ""),
        data=entry.get("data", ""),
        seeds=tuple(entry.get("seeds", (0,))),
        common=entry.get("common", {}),
        rows=entry["rows"],
        settings=entry.get("settings", {"default": {}}),
        special=entry.get("special", {}),
        small=entry[MINI],
        choices=tuple(entry["choices"]),
        numbers=entry.get("numbers", {}),
    )
