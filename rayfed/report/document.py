"""Writes report.md of a run: results, figures, what the words mean, settings, commands, time and files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rayfed.record.readers import read_json, read_yaml, rows_so_far
from rayfed.report.table import Table

SETTINGS = (
    *("algorithm", "tuning.name", "model.name", "model.pretrained", "model.weights"),
    *("data.name", "data.held_out"),
    *("data.partition.scheme", "data.partition.clients_per_domain", "data.partition.alpha"),
    *("data.partition.factor", "rounds", "clients_per_round", "train.optimizer", "train.lr", "train.epochs"),
    *("train.batch_size", "capacity", "seed"),
)
"""Keys of the config that the report shows, before the hyperparameters of the method and the tuning."""

ONLY_UNDER = {
    "data.partition.alpha": ("dirichlet",),
    "data.partition.factor": ("imbalanced",),
    "data.partition.clients_per_domain": ("by_domain", "dirichlet"),
}
"""Keys that count under these values of data.partition.scheme only."""

WORDS = {
    "mean over clients": "each client counts once, however many examples it has",
    "mean over domains": "each domain counts once, with the mean over its clients",
    "sigma_type": "population standard deviation over domains of their scores, in percentage points; 0: the "
    "model is equally good for all domains",
    "sigma_client": "population standard deviation over clients of their scores, in percentage points",
    "worst domain": "the domain with the lowest score",
}
"""What the words of the notes below the table mean."""

FILES = {
    "config.yaml": "every setting, for `--config`",
    "environment.json": "versions of all packages, digests of the data, the commands",
    "partition.parquet": "who has which example, and in which split",
    "rounds.jsonl": "one JSON object for each round; scores are fractions",
    "result.json": "the same, from an earlier version",
    "progress.csv": "the same as CSV",
    "rounds.parquet": "the same as a Parquet table",
    "clients.parquet": "scores and losses of every client and domain in every round",
    "transfers.parquet": "bytes that were sent and received in every exchange",
    "aggregation.parquet": "weight of every client in the mean of each round",
    "events.parquet": "failures and what was done about them",
    "model": "the final trainable tensors",
    "checkpoints": "from which `rayfed.resume` continues",
    "history": "the tables of each round, from which those above are made",
    "tensorboard": "the curves for TensorBoard",
    "figures": "the figures of this report",
}
"""What the files of a run hold."""


def document(folder: Path, table: Table, pictures: Mapping[str, Path]) -> str:
    """The text of report.md.

    Args:
        folder: Folder of the run.
        table: The final table.
        pictures: Files of the figures, by title.

    Returns:
        Markdown. What differs between repetitions of a run, commands and times, is under the last heading.
    """
    config = read_yaml(folder / "config.yaml")
    shown = [f"\n![{title}](figures/{file.name})\n" for title, file in pictures.items()]
    parts = [table.markdown(), *shown, "\n## What the words mean\n\n", *_list(_words(table))]
    parts += ["\n## Settings\n\n", *_settings(config), "\n## How it was run\n\n", *_how(folder)]
    files = {name: what for name, what in FILES.items() if (folder / name).exists()}
    others = (file.name for file in sorted(folder.glob("*.parquet")) if file.name not in FILES)
    files |= dict.fromkeys(others, "a table of the method")
    return "".join([*parts, "\nFiles in the folder:\n\n", *_list(files)])


def _list(entries: Mapping[str, str]) -> list[str]:
    return [f"- `{name}`: {what}\n" for name, what in entries.items()]


def _words(table: Table) -> dict[str, str]:
    notes = " ".join(table.notes).replace("over domains", "mean over domains")
    return {word: meaning for word, meaning in WORDS.items() if word in notes}


def _settings(config: Mapping[str, Any]) -> Iterator[str]:
    scheme = _value(config, "data.partition.scheme")
    yield "| key | value |\n| --- | --- |\n"
    for key in SETTINGS:
        value = _value(config, key)
        if value is not None and scheme in ONLY_UNDER.get(key, (scheme,)):
            yield f"| `{key}` | {value} |\n"
    for section in ("server", "local", "tuning"):
        for name, value in config.get(section, {}).items():
            if name != "name":
                yield f"| `{section}.{name}` | {value} |\n"


def _value(config: Mapping[str, Any], key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _how(folder: Path) -> Iterator[str]:
    commands = read_json(folder / "environment.json", dict).get("commands") or []
    if commands:
        yield "".join(f"    {command}\n" for command in commands) + "\n"
    yield f"Repeat it: `python -m rayfed.run --config {folder}/config.yaml output=NEW`\n"
    if (folder / "checkpoints").exists():
        yield f"Go on for 10 more rounds: `python -m rayfed.resume {folder} rounds=+10`\n"
    rows = rows_so_far(folder)
    seconds = sum(row.get("seconds") or 0.0 for row in rows)
    what = "round" if len(rows) == 1 else "rounds"
    yield f"\n{len(rows)} {what} in {seconds:.0f} s, without the time in which the actors were started.\n"
