"""The folder of a run: what was run, on what, and what came out."""

from __future__ import annotations

import csv
import io
import json
import platform
import shutil
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rayfed.driver import Round
from rayfed.errors import ConfigError
from rayfed.params import digest
from rayfed.report.files import write_parquet, write_text, write_whole
from rayfed.types import Params

PACKAGES = ("rayfed-sim", "ray", "torch", "torchvision", "timm", "peft", "scikit-learn", "pyarrow", "numpy")
WRITE_SHARE = 20  # tables are rewritten when at least this many times the last writing time has passed


def create(path: Path, overwrite: bool = False) -> Path:
    """Make the folder of a run and prove that it can be written.

    Raises:
        ConfigError: It holds an earlier run, or it cannot be written.
    """
    if (path / "result.json").exists() or (path / "config.yaml").exists():
        if not overwrite:
            raise ConfigError(
                f"output: {str(path)!r} already holds a run; choose another folder or set overwrite=true"
            )
        _clear(path)
    try:
        (path / "model").mkdir(parents=True, exist_ok=True)
        write_text(path / ".writable", "")
        (path / ".writable").unlink()
    except OSError as err:
        raise ConfigError(f"output: cannot write to {str(path)!r}: {err.strerror}") from err
    return path


def discard(path: Path) -> None:
    """Remove what a run that never began has left, and the folder if nothing else is in it."""
    _clear(path)
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()


def _clear(path: Path) -> None:
    """Remove the files of an earlier run, and nothing that a run does not write."""
    for name in ("model", "figures", "tensorboard", "checkpoints", "compare"):
        shutil.rmtree(path / name, ignore_errors=True)
    for pattern in (
        "*.parquet",
        "result.json",
        "progress.csv",
        "config.yaml",
        "environment.json",
        "report.*",
    ):
        for file in path.glob(pattern):
            file.unlink()


class RunFolder:
    """Writes rounds into the folder of a run as they finish."""

    def __init__(self, path: Path, domains: Mapping[str, str]) -> None:
        """Args: path: an existing folder. domains: domain of every client."""
        self.path = path
        self._domains = domains
        self._rows: list[dict[str, Any]] = []
        self._tables: dict[str, list[dict[str, Any]]] = {}
        self._cost, self._written = 0.0, 0.0

    def describe(self, config: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Write config.yaml (repeats the run) and environment.json (what it ran on)."""
        import yaml

        write_text(self.path / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False))
        versions = {name: version for name in PACKAGES if (version := _version(name))}
        machine = {"python": platform.python_version(), "platform": platform.platform(), "packages": versions}
        write_text(self.path / "environment.json", json.dumps({**machine, **facts}, indent=1) + "\n")

    def add(self, done: Round) -> None:
        """Append a round to result.json and progress.csv, and its details to the tables."""
        self._rows.append(done.row)
        number = done.row["round"]
        self._table("rounds").append(done.row)
        self._table("clients").extend(self._client_rows(done))
        self._table("transfers").extend({"round": number, **row} for row in done.ledger.transfers)
        for name, rows in done.ledger.tables.items():
            self._table(name).extend({"round": number, **row} for row in rows)
        write_text(self.path / "result.json", "".join(json.dumps(row) + "\n" for row in self._rows))
        write_text(self.path / "progress.csv", _csv(self._rows))
        if time.monotonic() - self._written > WRITE_SHARE * self._cost:
            self.write_tables()

    def write_tables(self) -> None:
        """Write every table; called when enough time has passed and at the end."""
        began = time.monotonic()
        for name, rows in self._tables.items():
            if rows:
                write_parquet(self.path / f"{name}.parquet", rows)
        self._written = time.monotonic()
        self._cost = self._written - began

    def finish(self, params: Params) -> str:
        """Write the final tensors and all tables; returns the sha256 of the tensors."""
        from safetensors.torch import save_file

        self.write_tables()
        tensors = {name: value.contiguous() for name, value in params.items()}
        write_whole(self.path / "model" / "params.safetensors", lambda p: save_file(tensors, p))
        return digest(params)

    def _table(self, name: str) -> list[dict[str, Any]]:
        return self._tables.setdefault(name, [])

    def _client_rows(self, done: Round) -> list[dict[str, Any]]:
        number, rows = done.row["round"], []
        for answer in done.ledger.scores:
            for name, value in answer.metrics.items():
                model, _, metric = name.rpartition("/")
                rows.append(self._row(number, answer.exchange, answer.client, model or "sent", metric, value))
        for model, scores in done.scores.items():
            for kind in ("clients", "domains", "held_out"):
                for name, score in getattr(scores, kind).items():
                    for metric, value in ((score.metric, score.value), ("loss", score.loss)):
                        rows.append(self._row(number, f"report_{kind}", name, model, metric, value))
        return rows

    def _row(
        self, round: int, exchange: str, client: str, model: str, metric: str, value: float
    ) -> dict[str, Any]:
        return {
            "round": round,
            "exchange": exchange,
            "client": client,
            "domain": self._domains.get(client, client),
            "model": model,
            "metric": metric,
            "value": float(value),
        }


def _csv(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
