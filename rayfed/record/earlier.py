"""Run folders of earlier versions, without marker and list of files: they are continued, never cleared."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rayfed.record.readers import ROWS, DamagedError, read_json, read_rows, read_yaml

ALWAYS = ("config.yaml", "environment.json", "partition.parquet")
"""Files that every run has, besides the one with its rounds."""

FILES = (
    *(*ALWAYS, "report.md", ROWS),
    *("events.jsonl", "events.parquet", "trackers.json", "rounds.parquet", "clients.parquet"),
    *("transfers.parquet", "model/params.safetensors"),
    *("model/adapter_config.json", "model/adapter_model.safetensors", "model/README.md"),
)
"""Files that such a run writes again when it is continued."""

NUMBERED = {
    "history": r"\d{6,}\.json\.gz",
    "tensorboard": r"events\.out\.tfevents\.\d+\.\d+",
    "checkpoints/stores": r"[0-9a-f]{64}\.safetensors",
}
"""Patterns of files, by folder, that it may remove when it is continued."""


def check_run(path: Path) -> None:
    """Check that a folder without a marker holds a run.

    Raises:
        DamagedError: It holds none; the message names the file that is missing or has other content.
    """
    if not (path / "config.yaml").is_file():
        raise DamagedError(f"{path}: holds no run to continue (there is no config.yaml)")
    config = read_yaml(path / "config.yaml")
    if not {"algorithm", "rounds", "data", "model", "tuning"} <= set(config):
        raise DamagedError(f"{path}: holds no run to continue (config.yaml is not that of a run)")
    if config.get("protocol", "single") != "single":
        if not any(is_run(file.parent) for file in sorted(path.glob("*/config.yaml"))):
            raise DamagedError(f"{path}: holds no run to continue (none of its folders has one)")
        return
    facts = read_json(path / "environment.json", dict)
    if not _is_environment(facts):
        raise DamagedError(f"{path}: holds no run to continue (environment.json is not that of a run)")
    if (path / ROWS).exists() or any((path / "history").glob("*.json.gz")):
        read_rows(path)


def is_run(path: Path) -> bool:
    """Whether a folder without a marker holds a run."""
    try:
        check_run(path)
    except (DamagedError, OSError):
        return False
    return True


def _is_environment(facts: dict[str, Any]) -> bool:
    texts = ("python", "data_digest", "partition_digest")
    return isinstance(facts.get("packages"), dict) and all(isinstance(facts.get(key), str) for key in texts)


def names(path: Path) -> Iterator[str]:
    """Names of the files that the run in this folder writes again or removes when it is continued."""
    yield from (name for name in FILES if (path / name).is_file())
    for folder, pattern in NUMBERED.items():
        yield from _matching(path, folder, pattern)
    for checkpoint in sorted((path / "checkpoints").glob("round-*")):
        folder = f"checkpoints/{checkpoint.name}"
        if re.fullmatch(r"round-\d{6,}", checkpoint.name):
            yield from _matching(path, folder, r"state\.safetensors|checkpoint\.json")
            yield f"{folder}/"


def _matching(path: Path, folder: str, pattern: str) -> Iterator[str]:
    for file in sorted((path / folder).glob("*")):
        if re.fullmatch(pattern, file.name) and file.is_file():
            yield f"{folder}/{file.name}"
