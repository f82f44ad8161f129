"""Writes and reads checkpoints: the state of the server and the private store of every client.

Files are safetensors and JSON only, so that reading them runs no code. A checkpoint is complete once its
JSON file exists. Stores are named by the digest of their content, so that an unchanged store is written
only once. The JSON file holds digests of itself, of the history of its rounds, of the config and of the
data, so that later changes of any of them are detected.

Nested values of tensors, numbers and strings are written into one safetensors file. Containers are stored
as JSON in the metadata of the file, which refers to its tensors by name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayfed.config.config_changes import changes, config_changes, is_about_the_end
from rayfed.errors import ConfigError
from rayfed.federation.executor import Executor, Kept
from rayfed.record.atomic_files import remove_file, write_bytes, write_text
from rayfed.record.history import History
from rayfed.record.readers import DamagedError, digest_of, read_json, reading
from rayfed.types import Params, ServerState
from rayfed.user_files import checked_depth, parse_json

FORMAT = 2
FACTS = "checkpoint.json"
WHAT = {
    "stores": "which client has which store",
    "config": "the config",
    "data": "the digests of the data",
}
"""Entries of a checkpoint, as messages name them."""
DIGESTS = {
    "data_digest": "data: the images",
    "partition_digest": "data.partition: the clients' images",
    "trace_digest": "faults.trace: the file",
    "algorithm_source": "algorithm: the source of the method",
    "server_source": "server.name: the source of the method",
    "local_source": "local.name: the source of the method",
    "tuning_source": "tuning: the source of the scheme",
    "model_source": "model: the source of the network",
    "reader_source": "data: the source of the data",
    "task_source": "task: the source of the task",
}
"""Subjects of the digests of the data, by their names in environment.json."""


SOURCE = "_source"
"""End of the names of digests of sources of users."""


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """The inputs of a run, with which a checkpoint can be continued.

    Attributes:
        config: The config, as in config.yaml.
        data: Digests of images, partition and trace, by their names in environment.json.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)

    def check_unchanged(self, facts: Mapping[str, Any], path: Path) -> None:
        """Check that a checkpoint was saved with the same inputs.

        Args:
            facts: Entries of the checkpoint.
            path: Folder of the run, for errors.

        Raises:
            ConfigError: A key of the config or a digest that affects the result changed; names it.
        """
        where = f"when round {facts['round']} of {path} was saved"
        advice = "put it back or start a new run"
        now = json.loads(json.dumps(self.config))  # with the key types that JSON has
        for key, old, new in config_changes(facts["config"], now):
            if not is_about_the_end(key) or (key == "rounds" and _depends_on_rounds(now)):
                raise ConfigError(f"{key} in config.yaml was {old!r} {where} and is {new!r} now; {advice}")
        for key, old, _ in changes(facts["data"], self.data):
            if old is None and key.endswith(SOURCE):  # a run of a version that did not write it
                continue
            raise ConfigError(
                f"{DIGESTS.get(key, key)} changed since round {facts['round']} of {path}; {advice}"
            )


def _depends_on_rounds(config: Mapping[str, Any]) -> bool:
    """Whether the learning rate of a round depends on the number of all rounds."""
    train = config.get("train")
    return isinstance(train, Mapping) and train.get("schedule", "constant") != "constant"


NOTHING = RunInputs()


def seals(facts: Mapping[str, Any]) -> dict[str, str]:
    """The SHA-256 digest of every entry of a checkpoint."""
    return {
        key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        for key, value in facts.items()
    }


def read_facts(path: Path) -> dict[str, Any]:
    """The entries of a checkpoint, checked against their digests.

    Raises:
        DamagedError: An entry was changed, or the format is not known.
    """
    facts = read_json(path / FACTS, dict)
    with reading(path / FACTS):
        if facts["format"] != FORMAT:
            raise DamagedError(f"format {facts['format']!r}, this version reads {FORMAT}")
        sealed = facts.pop("seals")
        changed = [key for key, seal in seals(facts).items() if sealed.get(key) != seal]
        changed += [key for key in sealed if key not in facts]
        if changed:
            what = WHAT.get(changed[0], changed[0])
            raise DamagedError(f"{FACTS}: {what} was changed")
        if path.name != _name_of(facts["round"]):
            raise DamagedError(f"{FACTS} belongs to round {facts['round']}")
    return facts


TREE = "tree"


def to_bytes(value: Any, where: str) -> bytes:
    """A safetensors file with all tensors of a nested value.

    Args:
        value: Tensors, numbers, strings, booleans, None, and dicts, lists and tuples of these.
        where: Description of the value, for errors.

    Raises:
        TypeError: It holds something else; the message says where.
        DocumentError: Its containers are nested too deeply.
    """
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    tree = _flatten(value, where, tensors)
    return save(_contiguous_copies(tensors), metadata={TREE: json.dumps(checked_depth(tree))})


def from_file(path: Path) -> Any:
    """Undo `to_bytes`.

    Raises:
        ValueError: The file is not one that `to_bytes` wrote.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tree = parse_json((file.metadata() or {})[TREE])
            return _restore(tree, {name: file.get_tensor(name).clone() for name in file.keys()})  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError) as err:
        raise ValueError(f"{path.name} is not a saved state: {err}") from err


def _flatten(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON: types that JSON lacks become `{kind: content}`; tensors are added to `tensors`."""
    kind = type(value)
    if isinstance(value, Tensor):
        name = where if where not in tensors else f"{where}#{len(tensors)}"
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"{where}: the key {key!r} is neither a string nor an integer")
        return {"dict": [[key, _flatten(v, f"{where}/{key}", tensors)] for key, v in value.items()]}
    if kind in (list, tuple):
        items = [_flatten(v, f"{where}/{i}", tensors) for i, v in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if value is None or kind in (bool, int, float, str):
        return value
    raise TypeError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}; only tensors, numbers, strings and dicts, "
        f"lists and tuples of these outlive a round"
    )


def _restore(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_restore(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_restore(item, tensors) for item in content)
    if kind != "dict":
        raise KeyError(kind)
    return {key: _restore(item, tensors) for key, item in content}


def _contiguous_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU copies that share no storage, as safetensors requires."""
    seen: set[int] = set()
    copies = {}
    for name, value in tensors.items():
        held = value.cpu().contiguous()
        storage = held.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != held.numel() * held.element_size():
            held = held.clone(memory_format=torch.contiguous_format)
        seen.add(held.untyped_storage().data_ptr())
        copies[name] = held
    return copies


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
        stores: File of each client's private store.
    """

    state: ServerState
    stores: Mapping[str, Path]


def restore(stores: Mapping[str, Path], executor: Executor) -> None:
    """Give the executor the stores of all clients, reading one at a time. Args: stores: files, by client."""
    executor.forget()
    for client, file in stores.items():
        executor.restore(client, from_file(file))


class Checkpoints:
    """The checkpoints in the folder of one run."""

    def __init__(self, run: Path, keep: int = 2, basis: RunInputs = NOTHING) -> None:
        """Args: run: its folder. keep: number of checkpoints to keep. basis: config and data digests."""
        self.run = run
        self.path = run / CHECKPOINTS
        self._keep = keep
        self._basis = basis
        self._files: dict[
            str, tuple[int, str]
        ] = {}  # by client: serial number and file of the last saved store
        self._held: dict[Path, set[str]] | None = None  # store files of every checkpoint
        self.best = 0
        """Number of a round whose checkpoint is kept besides the newest ones; 0: none is."""

    def save(
        self,
        state: ServerState,
        stores: Mapping[str, Kept],
        executor: Executor,
        history: str = "",
    ) -> None:
        """Write one checkpoint completely or not at all, then remove those that are too old.

        Args:
            state: State of the server after the round.
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
        facts = {
            "format": FORMAT,
            "round": state.round + 1,
            "state": hashlib.sha256(data).hexdigest(),
            "stores": names,
            "history": history,
            "config": self._basis.config,
            "data": self._basis.data,
        }
        final = self.path / _name_of(state.round + 1)
        remove_file(final / FACTS)  # without this file the folder does not count as a checkpoint
        write_bytes(final / STATE, data)
        write_text(final / FACTS, json.dumps({**facts, "seals": seals(facts)}))
        self._held[final] = set(names.values())
        self._prune()

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

    def has(self, round: int) -> bool:
        """Whether there is a checkpoint of a round, which may be damaged. Args: round: its number, from 1."""
        return os.path.lexists(self.path / _name_of(round) / FACTS)

    def of_round(self, round: int, start: Params) -> Saved:
        """The checkpoint of one round.

        Args:
            round: Its number, from 1.
            start: As of `load`.

        Raises:
            ConfigError: It cannot be used.
        """
        try:
            return _read(self.path / _name_of(round), start)
        except DamagedError as err:
            raise ConfigError(
                f"{self.path / _name_of(round)}: the checkpoint with the final model cannot be used ({err}); "
                f"put back what was changed, or start the run again with overwrite=true"
            ) from err

    def before(self, round: int, start: Params) -> Saved | None:
        """The newest checkpoint of a round before this one that can be read; None: there is none.

        Args:
            round: Number of a round, from 1.
            start: As of `load`.
        """
        for path in sorted(self._all(), reverse=True):
            if path.name < _name_of(round):
                with suppress(DamagedError):
                    return _read(path, start)
        return None

    def newest_facts(self) -> dict[str, Any]:
        """The entries of the newest checkpoint that can be read; empty: there is none."""
        for path in sorted(self._all(), reverse=True):
            with suppress(DamagedError):
                return read_facts(path)
        return {}

    def check_continuable(self, rounds: int) -> None:
        """Check, before anything starts, that the run can be continued from its checkpoints.

        Args:
            rounds: Number of finished rounds on disk.

        Raises:
            ConfigError: The config or the data changed since the last checkpoint, or the checkpoints of
                finished rounds are missing.
        """
        paths = sorted(self._all(), reverse=True)
        if not paths and rounds > 1:  # the first round is on disk before its checkpoint, and can be repeated
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
        best = _name_of(self.best)
        old = [path for path in sorted(self._held)[: -self._keep] if path.name != best]
        gone = set().union(*(self._held.pop(path) for path in old))
        for path in old:
            for name in (FACTS, STATE):
                remove_file(path / name)
            with suppress(OSError):  # something else is in it
                path.rmdir()
        for name in gone.difference(*self._held.values()):
            remove_file(_store_file(self.path, name))

    def newest(self) -> int:
        """The number of finished rounds of the newest checkpoint, as its name says; 0: there is none."""
        return max((int(path.name.removeprefix("round-")) for path in self._all()), default=0)

    def _all(self) -> Iterator[Path]:
        folders = (p for p in self.path.glob("round-*") if NAME.fullmatch(p.name))
        return (p for p in folders if os.path.lexists(p / FACTS))


def _name_of(round: int) -> str:
    """Name of the folder of a checkpoint. Args: round: number of the round, from 1."""
    return f"round-{round:06d}"


def _store_file(folder: Path, name: str) -> Path:
    return folder / "stores" / f"{name}.safetensors"


def _stores(path: Path) -> dict[str, str]:
    """File name of each client's store; empty if the checkpoint is damaged."""
    try:
        return _checked_stores(read_facts(path))
    except DamagedError:
        return {}


def state_after(run: Path, round: int) -> ServerState:
    """The state of the server after a round: the trained tensors by global name, and what it remembers.

    Args:
        run: Folder of the run.
        round: Number of the round, from 1.

    Raises:
        DamagedError: There is no checkpoint of the round, or its files were changed.
    """
    path = run / CHECKPOINTS / _name_of(round)
    if not path.exists():
        raise DamagedError(f"{path.name}: there is no such checkpoint")
    facts = read_facts(path)
    with reading(path):
        _check_content(path / STATE, facts["state"])
        return ServerState(**from_file(path / STATE))


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
        if path.name != _name_of(state.round + 1):
            raise DamagedError(f"{STATE} belongs to round {state.round + 1}")
        _check_params(state.params, start)
        History(path.parent.parent).check_unchanged(state.round + 1, facts.get("history", ""))
    files = {client: _store_file(path.parent, name) for client, name in stores.items()}
    return Saved(state=state, stores=files)


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
