"""Writes report.md of a run: results, figures, what the words mean, settings, commands, time and files."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rayfed.columns import MEAN, OVER_DOMAINS, POOLED, SECONDS, SIGMA_CLIENT, SIGMA_TYPE, WORST_DOMAIN
from rayfed.record.atomic_files import write_text
from rayfed.record.folder import TENSORS, has_own_objects
from rayfed.record.readers import read_bytes, reading
from rayfed.record.recorded_run import RecordedRun
from rayfed.report.style import Drawing
from rayfed.terminal.table_formats import Table

SETTINGS = (
    *("algorithm", "compare", "protocol", "tuning.name", "model.name", "model.pretrained", "model.weights"),
    *("data.name", "data.held_out"),
    *("data.partition.scheme", "data.partition.clients_per_domain", "data.partition.alpha"),
    *("data.partition.factor", "rounds", "clients_per_round", "train.optimizer", "train.lr", "train.epochs"),
    *("train.batch_size", "capacity", "channel", "seed"),
)
"""Keys of the config that the report shows, before the hyperparameters of the method and the tuning."""

ONLY_UNDER = {
    "data.partition.alpha": ("dirichlet",),
    "data.partition.factor": ("imbalanced",),
    "data.partition.clients_per_domain": ("by_domain", "dirichlet"),
}
"""Keys that count under these values of data.partition.scheme only."""

WORDS = {
    MEAN.words: MEAN.meaning,
    POOLED: "computed once from the test examples of all clients together",
    **{column.words: column.meaning for column in (OVER_DOMAINS, SIGMA_TYPE, SIGMA_CLIENT)},
    "without_adapters": "the score with the trained tensors outside the head put back to their start values",
    "without_head": "the score with the head put back to its start values",
    WORST_DOMAIN.words: WORST_DOMAIN.meaning,
    "average": "mean of the clients' scores, each client counts once",
    "worst 10%": "mean of the lowest tenth of the clients' scores",
    "best 10%": "mean of the highest tenth of the clients' scores",
    "variance": "population variance of the clients' scores in percent",
    "over examples": "each test example counts once; empty where clients share their test examples",
}
"""Meaning of the words of the columns and of the notes below the table."""

FILES = {
    "config.yaml": "every setting, for `--config`",
    "environment.json": "versions of all packages, digests of the data, the commands",
    "partition.parquet": "who has which example, and in which split",
    "rounds.jsonl": "one JSON object for each round; scores are fractions",
    "rounds.parquet": "the same as a Parquet table",
    "clients.parquet": "scores and losses of every client and domain in every round",
    "transfers.parquet": "bytes that were sent and received in every exchange",
    "aggregation.parquet": "weight of every client in the mean of each round",
    "events.parquet": "failures and what was done about them",
    "model": "the final trainable tensors",
    "without.json": "scores of the final model with adapters, or the head, put back to their start values",
    "study.json": "the runs in this folder, with their digests",
    "checkpoints": "from which `rayfed.resume` continues",
    "history": "the tables of each round, from which those above are made",
    "tensorboard": "the curves for TensorBoard",
    "figures": "the figures of this report",
    "report.html": "everything on one page, written by `rayfed.report`",
    "report.json": "the numbers of that page",
}
"""Contents of the files of a run."""


def document(
    run: RecordedRun,
    tables: Sequence[Table],
    pictures: Mapping[str, Path],
    inside: Mapping[str, str] | None = None,
) -> str:
    """The text of report.md.

    Args:
        run: The run, or the folder of several.
        tables: The final tables.
        pictures: Files of the figures, by title.
        inside: Folders of other runs of the same command, below that of the run, with what they are.

    Returns:
        Markdown. What differs between repetitions of a run, commands and times, is under the last heading.
    """
    folder = run.path
    shown = [f"\n![{title}](figures/{file.name})\n" for title, file in pictures.items()]
    inside = inside or {}
    parts = ["\n".join(table.markdown() for table in tables), *shown]
    if words := _words(tables):
        parts += ["\n## What the words mean\n\n", *_list(words)]
    parts += ["\n## Settings\n\n", *_settings(run.config), "\n## How it was run\n\n"]
    parts += _how(run, [RecordedRun(folder / name) for name in inside])
    files = {name: what for name, what in FILES.items() if (folder / name).exists()}
    files |= {name: what for name, what in inside.items() if Path(name).parts[0] not in files}
    others = (file.name for file in sorted(folder.glob("*.parquet")) if file.name not in FILES)
    files |= dict.fromkeys(others, "a table of the method")
    return "".join([*parts, "\nFiles in the folder:\n\n", *_list(files)])


def _list(entries: Mapping[str, str]) -> list[str]:
    return [f"- `{name}`: {what}\n" for name, what in entries.items()]


def _words(tables: Sequence[Table]) -> dict[str, str]:
    notes = " ".join(note for table in tables for note in table.notes)
    columns = {head.name for table in tables for head in table.heads}
    notes = " ".join([notes.replace("over domains", "mean over domains"), *sorted(columns)])
    return {word: meaning for word, meaning in WORDS.items() if word in notes}


def _settings(config: Mapping[str, Any]) -> Iterator[str]:
    scheme = _value(config, "data.partition.scheme")
    yield "| key | value |\n| --- | --- |\n"
    for key in SETTINGS:
        value = _value(config, key)
        if value not in (None, []) and scheme in ONLY_UNDER.get(key, (scheme,)):
            yield f"| `{key}` | {value} |\n"
    for section in ("server", "local", "tuning"):
        for name, value in config.get(section, {}).items():
            if name != "name":
                yield f"| `{section}.{name}` | {value} |\n"


def _value(config: Mapping[str, Any], key: str) -> Any:
    node: Any = config
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _how(run: RecordedRun, inside: Sequence[RecordedRun]) -> Iterator[str]:
    folder = run.path
    runs = [each for each in (run, *inside) if each.environment]
    commands = dict.fromkeys(command for each in runs for command in each.commands)
    if commands:
        yield "".join(f"    {command}\n" for command in commands) + "\n"
    config = shlex.quote(str(folder / "config.yaml"))
    if has_own_objects(folder):
        yield f"Go on for more rounds: `rayfed.Experiment(..., rounds=N).resume({str(folder)!r})`\n"
    else:
        yield f"Repeat it: `python -m rayfed.run --config {config} output=NEW`\n"
        if (folder / "checkpoints").exists():
            command = f"python -m rayfed.resume {shlex.quote(str(folder))} rounds=+10"
            yield f"Go on for 10 more rounds: `{command}`\n"
    for each in runs:
        if command := harness_command(each):
            yield f"Score it with lm-evaluation-harness (`pip install lm_eval[hf]`): `{command}`\n"
    rows = [row for each in runs for row in each.rounds]
    seconds = SECONDS.total(rows)
    what = "round" if len(rows) == 1 else "rounds"
    of = f" of {len(runs)} runs" if len(runs) > 1 else ""
    yield f"\n{len(rows)} {what}{of} in {seconds:.0f} s, without the time in which the actors were started.\n"


SEPARATORS = (",", "=")
"""Characters between the values of `--model_args` of lm-evaluation-harness, which no value can have."""


def harness_command(run: RecordedRun) -> str:
    """The command of lm-evaluation-harness that scores the adapter of a language model.

    Returns:
        The command; empty where the run has no such adapter, or a path cannot be given to that command.
    """
    about = run.adapter
    base, adapter = str(about.get("base_model_name_or_path")), str(run.path / "model")
    if about.get("task_type") != "CAUSAL_LM" or any(sign in base + adapter for sign in SEPARATORS):
        return ""
    arguments = shlex.quote(f"pretrained={base},peft={adapter}")
    return f"lm_eval --model hf --model_args {arguments} --tasks hellaswag"


NO_ADAPTER = {
    "residual": "an update is more than its factors (tuning.residual)",
    "core": "a matrix between the factors was trained (tuning.core)",
    "personal": "each client has a second adapter (tuning.personal)",
    "sparse": "a sparse matrix was trained next to the factors (tuning.sparse)",
}
"""Why a run with LoRA has no adapter for PEFT, by the key of the config that is true."""


def why_no_adapter(run: RecordedRun) -> str:
    """Why the final model of a run with LoRA is no adapter for PEFT; empty: it is one, or there is none."""
    if run.adapter or not (run.path / TENSORS).exists():
        return ""
    tuning = run.config["tuning"]
    if tuning.get("name") != "lora":
        return ""
    return next((why for key, why in NO_ADAPTER.items() if tuning.get(key)), "factors stay at the clients")


def add_figure(folder: Path, title: str, drawing: Drawing) -> Path:
    """Save a figure in the folder of a run, and add it to report.md unless it is there already.

    Returns:
        The file of the figure.

    Raises:
        DamagedError: report.md cannot be read.
        StorageError: A file cannot be written.
    """
    picture = drawing.save(folder)
    report = folder / "report.md"
    with reading(report):
        text = read_bytes(report).decode() if report.exists() else ""
    link = f"](figures/{picture.name})"
    if link not in text:
        write_text(report, f"{text}\n![{title}{link}\n")
    return picture
