"""Checkpoints of a federation: the server's state and every client's private store, on disk and back.

Safetensors and JSON only, so that reading one runs no code. A checkpoint is moved into place when it is
complete; what it refers to is named by its content, so that a store that has not changed is written once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rayfed.errors import ConfigError
from rayfed.evaluation.metrics import Evaluation, Score
from rayfed.federation.executor import Executor, Kept
from rayfed.record.files import write_bytes, write_text
from rayfed.record.serialization import from_file, to_bytes
from rayfed.types import Params, ServerState

log = logging.getLogger(__name__)

FORMAT = 1
FOLDER = "checkpoints"
NAME = re.compile(r"round-(\d{6,})")
CONTENT = re.compile(r"[0-9a-f]{64}")


class DamagedError(Exception):
    """A checkpoint cannot be read back as it was written."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint read back.

    Attributes:
        state: What the server carried after the round.
        personal: Scores of the clients' own models, by client.
        stores: File of each client's private store.
    """

    state: ServerState
    personal: Mapping[str, Score]
    stores: Mapping[str, Path]

    def restore(self, executor: Executor) -> None:
        """Give every client its store back, one at a time."""
        executor.forget()
        for client, file in self.stores.items():
            executor.restore(client, from_file(file))


class Checkpoints:
    """The checkpoints in the folder of one run."""

    def __init__(self, run: Path, keep: int = 2) -> None:
        """Args: run: folder of the run. keep: how many of the last ones stay."""
        self.path = run / FOLDER
        self._keep = keep
        self._files: dict[str, tuple[int, str]] = {}  # serial number and file of what was saved last
        self._held: dict[Path, set[str]] | None = None  # files of every checkpoint there is

    def save(
        self, state: ServerState, personal: Evaluation | None, stores: Mapping[str, Kept], executor: Executor
    ) -> None:
        """Write one checkpoint, whole or not at all, then remove those that are too old.

        Raises:
            StorageError: The disk is full or cannot be written; earlier checkpoints are untouched.
            TypeError: A state or store holds something else than tensors, numbers, strings and containers.
        """
        if self._held is None:
            self._held = {path: set(_stores(path).values()) for path in self._all()}
        names = {client: self._write_store(client, kept, executor) for client, kept in stores.items()}
        data = to_bytes({f.name: getattr(state, f.name) for f in fields(state)}, "state")
        scores = personal.clients if personal else {}
        facts = {
            "format": FORMAT,
            "round": state.round + 1,
            "state": hashlib.sha256(data).hexdigest(),
            "stores": names,
            "personal": {client: asdict(score) for client, score in scores.items()},
        }
        final = self.path / f"round-{state.round + 1:06d}"
        temporary = final.with_name(f".{final.name}.tmp")
        try:
            write_bytes(temporary / "state.safetensors", data)
            write_text(temporary / "checkpoint.json", json.dumps(facts))
            shutil.rmtree(final, ignore_errors=True)
            temporary.replace(final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self._held[final] = set(names.values())
        self._prune()

    def load(self, start: Params, usable: Callable[[int], bool]) -> Saved | None:
        """The newest checkpoint that can be read; None where there is none at all.

        Args:
            start: Start tensors of the experiment; names and shapes must agree.
            usable: Whether the history of the rounds up to this one (counted from 1) is there.

        Raises:
            ConfigError: There are checkpoints, but none that can be used.
        """
        found = sorted(self._all(), reverse=True)
        for path in found:
            try:
                saved = _read(path, start)
                if not usable(saved.state.round + 1):
                    raise DamagedError("the history of its rounds is incomplete")  # noqa: TRY301
            except DamagedError as err:
                log.warning("checkpoint %s cannot be used (%s); trying the one before it", path.name, err)
            else:
                return saved
        if found:
            raise ConfigError(
                f"{self.path}: none of {len(found)} checkpoints can be used; start the run again"
            )
        return None

    def _write_store(self, client: str, kept: Kept, executor: Executor) -> str:
        serial, name = self._files.get(client, (-1, ""))
        if serial != kept.serial:
            data = to_bytes(executor.fetch(client, kept), f"store of client {client!r}")
            name = hashlib.sha256(data).hexdigest()
            file = _store_file(self.path, name)
            if not file.exists():
                write_bytes(file, data)
            self._files[client] = kept.serial, name
        return name

    def _prune(self) -> None:
        assert self._held is not None
        old = sorted(self._held)[: -self._keep]
        gone = set().union(*(self._held.pop(path) for path in old))
        for path in old:
            shutil.rmtree(path, ignore_errors=True)
        for name in gone.difference(*self._held.values()):
            _store_file(self.path, name).unlink(missing_ok=True)

    def _all(self) -> Iterator[Path]:
        return (p for p in self.path.glob("round-*") if NAME.fullmatch(p.name))


def _store_file(folder: Path, name: str) -> Path:
    return folder / "stores" / f"{name}.safetensors"


def _stores(path: Path) -> dict[str, str]:
    """Name of the file of each client's store; empty where the checkpoint is damaged."""
    try:
        return dict(json.loads((path / "checkpoint.json").read_text())["stores"])
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _read(path: Path, start: Params) -> Saved:
    """Check and read one checkpoint.

    Raises:
        DamagedError: A file is missing, changed, of another format, or not of this experiment.
    """
    try:
        facts = json.loads((path / "checkpoint.json").read_text())
        stores = _checked_stores(facts)
        for name in set(stores.values()):
            _check_content(_store_file(path.parent, name), name)
        file = path / "state.safetensors"
        _check_content(file, facts["state"])
        state = ServerState(**from_file(file))
        personal = {client: Score(**score) for client, score in facts["personal"].items()}
    except DamagedError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
        raise DamagedError(f"{type(err).__name__}: {err}".splitlines()[0]) from err
    _check_params(state.params, start)
    files = {client: _store_file(path.parent, name) for client, name in stores.items()}
    return Saved(state=state, personal=personal, stores=files)


def _checked_stores(facts: Mapping[str, Any]) -> dict[str, str]:
    if facts["format"] != FORMAT:
        raise DamagedError(f"format {facts['format']!r}, this version reads {FORMAT}")
    stores = {str(client): str(name) for client, name in facts["stores"].items()}
    bad = [name for name in stores.values() if not CONTENT.fullmatch(name)]
    if bad:
        raise DamagedError(f"{bad[0]!r} is not the name of a store")
    return stores


def _check_content(file: Path, digest: str) -> None:
    with file.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
            raise DamagedError(f"{file.name} is not what was written")


def _check_params(params: Params, start: Params) -> None:
    for name, value in params.items():
        if name not in start or value.shape != start[name].shape or value.dtype != start[name].dtype:
            raise DamagedError(f"tensor {name!r} does not belong to this experiment")
