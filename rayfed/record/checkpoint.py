"""Checkpoints of a federation: the server's state and every client's private store, on disk and back.

Safetensors and JSON only, so that reading one runs no code. A checkpoint is complete when its JSON file is
there; what it refers to is named by its content, so that a store that has not changed is written once. It
holds digests of what it stands on, so that an edit is noticed: its facts, the history of its rounds, config
and data.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rayfed.errors import ConfigError
from rayfed.evaluation.metrics import Evaluation, Score
from rayfed.federation.executor import Executor, Kept
from rayfed.record.files import write_bytes, write_text
from rayfed.record.history import History
from rayfed.record.ownership import SAVED, names_of, owner, remove, remove_folder
from rayfed.record.readers import DamagedError, digest_of, reading
from rayfed.record.seal import FACTS, FORMAT, NOTHING, Basis, read_facts, seals
from rayfed.record.serialization import from_file, to_bytes
from rayfed.types import Params, ServerState

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
STATE = "state.safetensors"
NAME = re.compile(r"round-(\d{6,})")
CONTENT = re.compile(r"[0-9a-f]{64}")


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

    def __init__(self, run: Path, keep: int = 2, basis: Basis = NOTHING) -> None:
        """Args: run: its folder. keep: how many of the last ones stay. basis: what the run stands on."""
        self.run, self.path = run, run / CHECKPOINTS
        self._keep, self._basis = keep, basis
        self._files: dict[str, tuple[int, str]] = {}  # serial number and file of what was saved last
        self._held: dict[Path, set[str]] | None = None  # files of every checkpoint there is

    def save(
        self,
        state: ServerState,
        personal: Evaluation | None,
        stores: Mapping[str, Kept],
        executor: Executor,
        history: str = "",
    ) -> None:
        """Write one checkpoint, whole or not at all, then remove those that are too old.

        Args:
            state: What the server carries.
            personal: Scores of the clients' own models.
            stores: The private stores of clients.
            executor: Where they are.
            history: Digest of the round's history; empty: it is not sealed.

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
            "history": history,
            "config": self._basis.config,
            "data": self._basis.data,
        }
        final = self.path / f"round-{state.round + 1:06d}"
        remove(final / FACTS)  # until it is there again, this is no checkpoint
        write_bytes(final / STATE, data)
        write_text(final / FACTS, json.dumps({**facts, "seals": seals(facts)}))
        root = owner(self.path)
        if root is not None and not names_of(root).has(SAVED):
            names_of(root).fact(SAVED)
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
        found, reasons = sorted(self._all(), reverse=True), []
        for path in found:
            try:
                saved = _read(path, start)
                if not usable(saved.state.round + 1):
                    raise DamagedError("the history of its rounds is incomplete")  # noqa: TRY301
            except DamagedError as err:
                reasons.append(f"{path.name}: {err}")
                log.warning("checkpoint %s cannot be used (%s); trying the one before it", path.name, err)
            else:
                return saved
        if found:
            raise ConfigError(
                f"{self.path}: none of {len(found)} checkpoints can be used ({reasons[0]}); put back "
                f"what was changed, or start the run again with overwrite=true"
            )
        return None

    def check_continuable(self, rounds: int) -> None:
        """Make sure, before anything starts, that a run can go on with what its checkpoints stand on.

        Args:
            rounds: Finished rounds on disk.

        Raises:
            ConfigError: Config or data have changed, or the checkpoints of finished rounds are missing.
        """
        paths = sorted(self._all(), reverse=True)
        if not paths and rounds > (0 if self.had_any() else 1):
            raise ConfigError(
                f"{self.path}: there is no checkpoint, so the {rounds} finished rounds cannot be continued; "
                f"put the checkpoints back, or start the run again with overwrite=true"
            )
        for path in paths:
            try:
                facts = read_facts(path)
            except DamagedError:
                continue
            if facts["format"] == FORMAT:
                self._basis.check_unchanged(facts, self.run)
                return
            log.warning("%s was saved by an earlier version: edits of its files cannot be noticed", path)
            return

    def had_any(self) -> bool:
        """Whether a checkpoint was ever complete, as far as the list of the run's files says."""
        root = owner(self.path)
        return root is not None and names_of(root).has(SAVED)

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
            for name in (FACTS, STATE):
                remove(path / name)
            remove_folder(path)
        for name in gone.difference(*self._held.values()):
            remove(_store_file(self.path, name))

    def _all(self) -> Iterator[Path]:
        found = (p for p in self.path.glob("round-*") if NAME.fullmatch(p.name))
        return (p for p in found if os.path.lexists(p / FACTS))


def _store_file(folder: Path, name: str) -> Path:
    return folder / "stores" / f"{name}.safetensors"


def _stores(path: Path) -> dict[str, str]:
    """Name of the file of each client's store; empty where the checkpoint is damaged."""
    try:
        return _checked_stores(read_facts(path))
    except DamagedError:
        return {}


def _read(path: Path, start: Params) -> Saved:
    """Check and read one checkpoint.

    Raises:
        DamagedError: A file is missing, changed, of another format, or not of this experiment.
    """
    facts = read_facts(path)
    with reading(path):
        stores = _checked_stores(facts)
        for name in set(stores.values()):
            _check_content(_store_file(path.parent, name), name)
        _check_content(path / STATE, facts["state"])
        state = ServerState(**from_file(path / STATE))
        personal = {client: Score(**score) for client, score in facts["personal"].items()}
        if path.name != f"round-{state.round + 1:06d}":
            raise DamagedError(f"{STATE} is that of round {state.round + 1}")
        _check_params(state.params, start)
        History(path.parent.parent).check_unchanged(state.round + 1, facts.get("history", ""))
    files = {client: _store_file(path.parent, name) for client, name in stores.items()}
    return Saved(state=state, personal=personal, stores=files)


def _checked_stores(facts: Mapping[str, Any]) -> dict[str, str]:
    with reading(Path(FACTS)):
        stores = {str(client): str(name) for client, name in facts["stores"].items()}
    bad = [name for name in stores.values() if not CONTENT.fullmatch(name)]
    if bad:
        raise DamagedError(f"{bad[0]!r} is not the name of a store")
    return stores


def _check_content(file: Path, digest: str) -> None:
    if digest_of(file) != digest:
        raise DamagedError(f"{file.name} is not what was written")


def _check_params(params: Params, start: Params) -> None:
    for name, value in params.items():
        if name not in start or value.shape != start[name].shape or value.dtype != start[name].dtype:
            raise DamagedError(f"tensor {name!r} does not belong to this experiment")
