"""The matrix of a paper's table: what each cell trains with and on, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayfed.config import papers
from rayfed.config.check_keys import plain
from rayfed.config.compose import folder
from rayfed.config.schema import Config, Request, load_config, to_dict
from rayfed.config.variants import PROTOCOLS, comparisons, differing_values, trained_otherwise
from rayfed.data.source import brings_data
from rayfed.errors import ConfigError, count_of
from rayfed.heterogeneity.capacity import sizes_of
from rayfed.terminal.table_formats import Table, terminal_width
from rayfed.tuning.base import TUNINGS
from rayfed.user_objects import title as title_of

ADAPTIVE = ("adam", "adamw")


def matrix_of(overrides: Sequence[str], file: str | Path | None = None) -> str:
    """The matrix of the experiment in `overrides` as text; without a table, the methods that would run.

    Args:
        overrides: As of `rayfed.config.schema.load_config`; all but `experiment`, `row`, `setting` and `seed`
            are applied to every cell.
        file: A resolved config to start from instead of the defaults, which has no table.

    Raises:
        ConfigError: A cell has no valid config.
    """
    given = dict(text.split("=", 1) for text in overrides if "=" in text)
    found = _table(given, file)
    if found is None:
        return methods_text(load_config(overrides, file))
    scale = papers.split_scale(given["experiment"])[1]
    others = [
        text for text in overrides if text.partition("=")[0] not in ("experiment", "seed", *papers.CHOICE)
    ]
    cells = []
    for cell in found.cells(scale):
        asked = {key: value for key, value in given.items() if key in papers.CHOICE}
        if (
            cell.seed == found.seeds[0]
            and asked.items() <= {"row": cell.row, "setting": cell.setting}.items()
        ):
            cells.append((cell.row, cell.setting, load_config([*cell.overrides, *others])))
    if not cells:
        load_config(overrides)  # names a row or a setting that does not exist
        raise ConfigError(f"experiment: {found.name} has no cell with the row and the setting that are given")
    return cells_text(found, scale, given.get("seed") or ", ".join(map(str, found.seeds)), cells)


def is_table(overrides: Sequence[str], file: str | Path | None = None) -> bool:
    """Whether the overrides name a paper's table, of which only `rayfed.reproduce` runs all cells."""
    return _table(dict(text.split("=", 1) for text in overrides if "=" in text), file) is not None


def _table(given: Mapping[str, str], file: str | Path | None) -> papers.PaperTable | None:
    return None if file else papers.find(folder(), given.get("experiment", ""))


def cells_text(
    table: papers.PaperTable, scale: str, seeds: str, cells: Sequence[tuple[str, str, Request]]
) -> str:
    """Cells of a paper's table, with what each trains with and on, its published numbers, and notes.

    Args:
        scale: `paper` or `mini`.
        seeds: Seeds of every cell, as text.
        cells: Row, setting and config of each cell; at least one.
    """
    rows = [
        (
            row,
            setting,
            seeds,
            *describe(config, config.protocol),
            published_text(table.numbers.get(setting, {}).get(row)),
        )
        for row, setting, config in cells
    ]
    ships = brings_data(cells[0][2].data)
    title = f"{table.reference}, {table.where}: {table.title}"
    if scale == papers.MINI or not ships:  # its own experiment may be small, too
        title += f" ({scale} scale)"
    return table_text(title, rows, notes(table, scale, ships))


def methods_text(config: Request) -> str:
    """The method of a config, and those that `compare` runs with it, as a table.

    Raises:
        ConfigError: A compared method does not fit.
    """
    configs = [config.alone(), *comparisons(config).values()]
    what = "one run" if len(configs) == 1 else f"{len(configs)} methods on the same data (compare)"
    if config.protocol in PROTOCOLS:
        what += f" for each {PROTOCOLS[config.protocol].part} (protocol={config.protocol})"
    rows = [("", "", str(each.seed), *describe(each, config.protocol), "") for each in configs]
    tunings = trained_otherwise(
        {each.algorithm: (each.tuning["name"], each.train.optimizer) for each in configs}
    )
    values = differing_values({each.algorithm: to_dict(each) for each in configs})
    return table_text(what, rows, [note for note in (tunings, values) if note])


def table_text(title: str, rows: Sequence[tuple[str, ...]], below: Sequence[str]) -> str:
    """A table of cells as text, which fits the terminal.

    Args:
        title: Its title.
        rows: One for each cell: row, setting, seeds, the five parts of `describe`, published numbers. What is
            empty in all of them gets no column.
        below: Lines below the table.
    """
    names = ("row", "setting", "seeds", "method", "tuning", "model", "data", "training", "paper")
    columns = [(name, *cells) for name, *cells in zip(names, *rows, strict=True) if any(cells)]
    head, *cells = zip(*columns, strict=True)
    return Table(title, head, tuple(cells), tuple(below)).text(terminal_width())


def describe(config: Config, protocol: str) -> tuple[str, str, str, str, str]:
    """Method, tuning, model, data and training of an experiment with a protocol, each in a few words."""
    data = f"{config.data.name} val {config.data.val} test {config.data.test}, {partition(to_dict(config))}"
    if config.data.limit is not None:
        data += f", at most {config.data.limit} of a domain"
    if config.data.augment is not None:
        data += f", {' '.join(config.data.augment.names)}"
    if config.data.held_out:
        data += f", {config.data.held_out} held out"
    elif protocol in PROTOCOLS:
        data += f", {PROTOCOLS[protocol].data}"
    for what in ("blocks", "rank"):
        if (sizes := sizes_of(config.capacity, what)) is not None:
            data += f", {what} {sizes}"
    usual = plain(TUNINGS.load(config.tuning["name"])())
    own = ((key, value) for key, value in config.tuning.items() if key != "name")
    tuning = ", ".join(f"{key} {_in_words(value)}" for key, value in own if value != usual.get(key))
    method = ", ".join(changed_hyperparameters(config))
    return (
        f"{config.algorithm} ({method})" if method else config.algorithm,
        f"{config.tuning['name']} ({tuning})" if tuning else config.tuning["name"],
        config.model.name,
        data,
        training(config),
    )


def _in_words(value: Any) -> str:
    """A value of a tuning scheme: of another scheme in it what its fields have beyond their defaults."""
    if not (isinstance(value, Mapping) and value.get("name") in TUNINGS.names()):
        return str(value)
    usual = plain(TUNINGS.load(value["name"])())
    own = [f"{key} {each}" for key, each in value.items() if key != "name" and each != usual.get(key)]
    return f"{value['name']} ({', '.join(own)})" if own else str(value["name"])


def training(config: Config) -> str:
    """Optimizer, steps and rounds in a few words; what is not named is as in plain training."""
    train = config.train
    text = f"{train.optimizer} {train.lr:g}"
    if train.optimizer not in ADAPTIVE and train.momentum:
        text += f" momentum {train.momentum:g}"
    if train.weight_decay:
        text += f" decay {train.weight_decay:g}"
    if train.schedule != "constant":
        text += f" {train.schedule}"
    if train.keep_optimizer:
        text += " kept"
    text += (
        f", batch {train.batch_size}, {count_of(train.epochs, 'epoch')}, {count_of(config.rounds, 'round')}"
    )
    if config.clients_per_round != "all":
        return f"{text} of {config.clients_per_round} clients ({title_of(config.sampling)})"
    return text if config.sampling == "uniform" else f"{text} ({title_of(config.sampling)})"


def changed_hyperparameters(config: Config) -> list[str]:
    """Hyperparameters of the two halves that are not those the algorithm has without an experiment."""
    bare = load_config([f"algorithm={config.algorithm}"])
    texts = []
    for section in ("server", "local"):
        own, usual = getattr(config, section), getattr(bare, section)
        texts += [f"{section}.{key} {own[key]}" for key in own if own[key] != usual.get(key)]
    return texts


def partition(config: Mapping[str, Any]) -> str:
    """Distribution of the samples, in a few words."""
    section = config["data"]["partition"]
    if section["pooled"]:
        return "one client with all data"
    scheme: str = section["scheme"]
    if scheme == "imbalanced":
        pool = "all" if section["pool_size"] is None else section["pool_size"]
        text = f"imbalanced {section['factor']:g}, {section['pool_share']:g} of {pool}"
        if section["order"] is not None:
            text += f", largest first: {' '.join(section['order'])}"
        return f"{text}, test images split" if section["split_test"] else text
    clients = f"{count_of(section['clients_per_domain'], 'client')} a domain"
    if scheme == "natural":
        return "clients of the data"
    return f"dirichlet {section['alpha']:g}, {clients}" if scheme == "dirichlet" else clients


def published_text(numbers: Any) -> str:
    """Published numbers of a cell: means, with the deviation over seeds in brackets where there is one."""
    if isinstance(numbers, Mapping):
        return "; ".join(f"{key}: {published_text(value)}" for key, value in numbers.items())
    pairs = ((value if isinstance(value, list) else [value]) for value in numbers or ())
    return " ".join(" ".join(f"({n:g})" if i else f"{n:g}" for i, n in enumerate(pair)) for pair in pairs)


def notes(table: papers.PaperTable, scale: str, ships: bool) -> list[str]:
    """Lines below the matrix: measures, selection of the round, origin of the data, and what we chose.

    Args:
        scale: `paper` or `mini`.
        ships: The data ship with RayFed.
    """
    lines = [f"paper: {', '.join(table.measures)}" if table.measures else "paper: prints no numbers of it"]
    lines.append(f"reported: {table.selection}")
    lines.append(f"data: {'ships with RayFed' if ships else table.data}")
    if table.figure:
        lines.append(f"figure: {table.figure}")
    ours = "our choice at the scale of the paper" if ships else "our choice"
    lines += [f"{ours}: {choice}" for choice in table.choices]
    cell = next(table.cells(scale))
    chosen = " ".join(f"'{text}'" if " " in text else text for text in cell.overrides)
    lines.append(f"the first cell: python -m rayfed.run {chosen}")
    return lines
