"""Writes and reads checkpoints: the state of the server and the private store of every client.

Files are safetensors and JSON only, so that reading them runs no code. A checkpoint is complete once its JSON
file exists. Stores are named by the digest of their content, so that an unchanged store is written only once.
The JSON file holds digests of itself, of the history of its rounds, of the config and of the data, so that
later changes of any of them are detected.
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
        state: State of the server after the round.
        personal: Last scores of the clients' personal models, by client.
        stores: File of each client's private store.
    """

    state: ServerState
    personal: Mapping[str, Score]
    stores: Mapping[str, Path]


def restore(stores: Mapping[str, Path], executor: Executor) -> None:
    """Give the executor the stores of all clients, reading one at a time. Args: stores: files, by client."""
    executor.forget()
    for client, file in stores.items():
        executor.restore(client, from_file(file))


class Checkpoints:
    """The checkpoints in the folder of one run."""

    def __init__(self, run: Path, keep: int = 2, basis: Basis = NOTHING) -> None:
        """Args: run: its folder. keep: number of checkpoints to keep. basis: config and data digests."""
        self.run = run
        self.path = run / CHECKPOINTS
        self._keep = keep
        self._basis = basis
        self._files: dict[
            str, tuple[int, str]
        ] = {}  # by client: serial number and file of the last saved store
        self._held: dict[Path, set[str]] | None = None  # store files of every checkpoint

    def save(
        self,
        state: ServerState,
        personal: Evaluation | None,
        stores: Mapping[str, Kept],
        executor: Executor,
        history: str = "",
    ) -> None:
        """Write one checkpoint completely or not at all, then remove those that are too old.

        Args:
            state: State of the server after the round.
            personal: Last scores of the clients' personal models.
            stores: References to the private stores of the clients.
            executor: Fetches a store by its reference.
            history: Digest of the round's history file; empty: the history is not checked when this
                checkpoint is read.

        Raises:
            StorageError: The disk is full or cannot be written; earlier checkpoints are untouched.
            TypeError: The state or a store holds something other than tensors, numbers, strings and
                containers of these.
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
        remove(final / FACTS)  # without this file the folder does not count as a checkpoint
        write_bytes(final / STATE, data)
        write_text(final / FACTS, json.dumps({**facts, "seals": seals(facts)}))
        self._held[final] = set(names.values())
        self._prune()
        if (root := owner(self.path)) is not None:
            if not names_of(root).has(SAVED):
                names_of(root).fact(SAVED)
            names_of(root).shrink()

    def load(self, start: Params, usable: Callable[[int], bool]) -> Saved | None:
        """The newest checkpoint that can be read; None if there is none at all.

        Args:
            start: Initial tensors of the experiment, with whose names and shapes the checkpoint must agree.
            usable: Tells whether the history of rounds 1 to n is complete.

        Raises:
            ConfigError: There are checkpoints, but none that can be used.
        """
        paths = sorted(self._all(), reverse=True)
        reasons = []
        for path in paths:
            try:
                saved = _read(path, start)
                if not usable(saved.state.round + 1):
                    raise DamagedError("the history of its rounds is incomplete")  # noqa: TRY301
            except DamagedError as err:
                reasons.append(f"{path.name}: {err}")
                log.warning("checkpoint %s cannot be used (%s); trying the one before it", path.name, err)
            else:
                return saved
        if paths:
            raise ConfigError(
                f"{self.path}: none of {len(paths)} checkpoints can be used ({reasons[0]}); put back "
                f"what was changed, or start the run again with overwrite=true"
            )
        return None

    def check_continuable(self, rounds: int) -> None:
        """Check, before anything starts, that the run can be continued from its checkpoints.

        Args:
            rounds: Number of finished rounds on disk.

        Raises:
            ConfigError: The config or the data changed since the last checkpoint, or the checkpoints of
                finished rounds are missing.
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
            self._basis.check_unchanged(facts, self.run)
            return

    def had_any(self) -> bool:
        """Whether the list of the run's files says that a checkpoint was once complete."""
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
    """File name of each client's store; empty if the checkpoint is damaged."""
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
            raise DamagedError(f"{STATE} belongs to round {state.round + 1}")
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
        raise DamagedError(f"{file.name} was changed")


def _check_params(params: Params, start: Params) -> None:
    for name, value in params.items():
        if name not in start or value.shape != start[name].shape or value.dtype != start[name].dtype:
            raise DamagedError(f"tensor {name!r} does not belong to this experiment")
