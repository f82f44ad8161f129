"""The folder of a study: its manifest, the right to write into it, and what each cell's folder holds.

`study.json` lists the cells by their coordinates, each with its folder, the digest of its description, and
once it is finished that of its tensors. It is written again, as a whole, after every cell.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rayfed.columns import Unit
from rayfed.config.config_changes import HARMLESS, config_changes
from rayfed.config.schema import Config, objects_of, to_dict
from rayfed.errors import ConfigError
from rayfed.experiment.study.coordinates import Key, Value, folders_of, in_words, labels_of, row_of
from rayfed.record import claim as folders
from rayfed.record.atomic_files import write_text
from rayfed.record.folder import TENSORS, digest_if_finished
from rayfed.record.readers import CELLS, STUDY, DamagedError, read_json, reading
from rayfed.record.recorded_run import RecordedRun, Rule
from rayfed.user_files import to_json
from rayfed.user_objects import is_own, why_other_values

KIND = "study"
"""Kind of the folder in its marker."""

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ManifestEntry:
    """A cell in the manifest.

    Attributes:
        folder: Its folder, relative to that of the study.
        description: Digest of what is run there; see `digest_of`.
        rounds: Number of its rounds.
        sha256: Digest of its final tensors; empty: it is not finished.
        stopped: The round after which a rule ended it; 0: none did.
    """

    folder: str
    description: str = ""
    rounds: int = 0
    sha256: str = ""
    stopped: int = 0


@dataclass
class Manifest:
    """The cells of a study on disk, and how far each is.

    Attributes:
        path: Folder of the study.
        names: Names of the coordinates.
        entries: The cells, in their order.
        score: The column that is compared; None: the metric of the runs.
        reported: Which round is reported; see `Study`.
        protocol: The protocol whose runs the cells are; empty: none.
        search: The trials of a search, as plain containers (`rayfed.experiment.study.trials`); None: it is
            none.
        margin: Largest difference between rows that count as equally good; None: that of the metric.
        equal: What all methods of a setting have as much of; None: nothing was made equal.
        tuned: What was chosen for each method before, as plain containers
            (`rayfed.report.tuned_values`); None: nothing was tuned.
        earlier: Folder to which what was in `path` was moved; None: there was nothing to keep.
    """

    path: Path
    names: tuple[str, ...]
    entries: dict[Key, ManifestEntry] = field(default_factory=dict)
    score: str | None = None
    reported: Rule = "final"
    protocol: str = ""
    search: dict[str, Any] | None = None
    margin: float | None = None
    equal: Unit | None = None
    tuned: dict[str, Any] | None = None
    earlier: Path | None = None

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """The manifest in a folder.

        Raises:
            ConfigError: The folder holds no study.
            DamagedError: The manifest cannot be read.
        """
        file = path / STUDY
        if not file.exists():
            raise ConfigError(f"{path}: holds no study (there is no {STUDY})")
        tree = read_json(file, dict)
        with reading(file):
            names = tuple(str(name) for name in tree["names"])
            entries: dict[Key, ManifestEntry] = {}
            for cell in tree["cells"]:
                at: Mapping[str, Value] = cell["coordinates"]
                rest = {name: cell[name] for name in ("folder", "description", "rounds", "sha256", "stopped")}
                entries[tuple(at[name] for name in names)] = ManifestEntry(**rest)
            facts = (
                tree["score"],
                tree["reported"],
                str(tree["protocol"]),
                tree.get("search"),
                tree.get("margin"),
                tree.get("equal"),
                tree.get("tuned"),
            )
            return cls(path, names, entries, *facts)

    def write(self) -> None:
        """Write the manifest."""
        labels = labels_of(self.entries, self.names)
        cells = [
            {
                "coordinates": dict(zip(self.names, key, strict=True)),
                "label": labels[row_of(key, self.names)],
                **vars(entry),
            }
            for key, entry in self.entries.items()
        ]
        tree = {
            "format": FORMAT,
            "names": list(self.names),
            "score": self.score,
            "reported": self.reported,
            "protocol": self.protocol,
            **({} if self.search is None else {"search": self.search}),
            **({} if self.margin is None else {"margin": self.margin}),
            **({} if self.equal is None else {"equal": self.equal}),
            **({} if self.tuned is None else {"tuned": self.tuned}),
            "cells": cells,
        }
        write_text(self.path / STUDY, to_json(tree, indent=1) + "\n")

    def place(self, key: Key) -> Path:
        """The folder of a cell."""
        return self.path / self.entries[key].folder

    def note(self, key: Key, **values: Any) -> None:
        """Change what is known about a cell, and write the manifest."""
        self.entries[key] = replace(self.entries[key], **values)
        self.write()

    def add(self, keys: Sequence[Key]) -> None:
        """Add the cells that are not in it yet, each with its folder.

        The order becomes that of `keys`, before the cells of earlier calls.
        """
        known = self.entries
        every = [*keys, *(key for key in known if key not in set(keys))]
        taken = {entry.folder for entry in known.values()}
        fresh = folders_of(every, self.names)
        self.entries = {}
        for key in every:
            folder = f"{CELLS}/{fresh[key]}"
            while key not in known and folder in taken:
                folder += "-2"
            self.entries[key] = known.get(key) or ManifestEntry(folder=folder)


def check_folder(path: Path) -> None:
    """Check that a folder is that of a study, or free for one.

    Raises:
        ConfigError: It holds something else, or may not be used.
    """
    folders.check_own_folder(path)
    mark = folders.mark_of(path)
    if mark is None or mark.kind != KIND:
        folders.look(path, kind=KIND)


@contextmanager
def held(path: Path, names: tuple[str, ...]) -> Iterator[Manifest]:
    """Hold the folder of a study while the block runs; gives its manifest, which is empty for a new folder.

    Raises:
        ConfigError: The folder holds something else or a study with other coordinates, another process holds
            it, or it cannot be written.
    """
    folders.check_own_folder(path)
    mark = folders.mark_of(path)
    if mark is None or mark.kind != KIND:
        with new_folder(path, folders.look(path, kind=KIND), names) as manifest:
            yield manifest
        return
    with folders.claim_again(path, KIND) as own:
        own.take_over()
        known = Manifest.read(path) if (path / STUDY).exists() else Manifest(path=path, names=names)
        if set(known.names) != set(names):
            raise ConfigError(
                f"study: {path} has cells with the coordinates {', '.join(known.names)}, and these have "
                f"{', '.join(names)}; choose another folder"
            )
        places = [known.names.index(name) for name in names]
        known.entries = {tuple(key[place] for place in places): each for key, each in known.entries.items()}
        known.names = names
        yield known


@contextmanager
def new_folder(path: Path, owner: str, names: tuple[str, ...], overwrite: bool = False) -> Iterator[Manifest]:
    """Hold the folder of a new study while the block runs; gives its manifest, which is empty.

    Args:
        owner: Result of `rayfed.record.claim.look`.
        names: Names of the coordinates.
        overwrite: Move the run or the study that is in the folder to NAME.before-1; `Manifest.earlier` says
            where it is then.

    Raises:
        ConfigError: The folder may not be used, another process holds it, or it cannot be written.
    """
    with folders.claim(path, owner, overwrite, kind=KIND) as own:
        try:
            yield Manifest(path=path, names=names, earlier=own.earlier)
        except ConfigError:
            if not (path / CELLS).exists():  # no cell began, so the same folder can be used again
                (path / STUDY).unlink(missing_ok=True)
                own.discard()
            raise


def digest_of(config: Config) -> str:
    """SHA-256 hex digest of what a result depends on in a config, and of the user's objects in it."""

    def counted(tree: Any, key: str = "") -> Any:
        if not isinstance(tree, Mapping):
            return tree
        whole = {name: f"{key}.{name}" if key else str(name) for name in tree}
        return {name: counted(tree[name], whole[name]) for name in tree if whole[name] not in HARMLESS}

    tree = {**counted(to_dict(config)), "threads": config.cluster.threads}
    digests = {key: each["digest"] for key, each in objects_of(config).items()}
    return hashlib.sha256(json.dumps([tree, digests], sort_keys=True, default=str).encode()).hexdigest()


def check_same(key: Key, names: Sequence[str], config: Config, entry: ManifestEntry, place: Path) -> None:
    """Check that the run that a cell's folder holds, if there is one, is that of its experiment.

    Args:
        key: The cell.
        names: Names of the coordinates.
        config: Its experiment now.
        entry: What the manifest has of it.

    Raises:
        ConfigError: The experiment is another one; names the cell, and the key or the object that changed.
    """
    if entry.description == digest_of(config) or not (place / "config.yaml").exists():
        return
    cell, recorded = f"the cell {in_words(key, names)}", RecordedRun(place)
    for name, old, new in config_changes(recorded.config, to_dict(config)):
        if name != "rounds" or new < old:
            raise ConfigError(differs(name, old, new, place, cell))
    try:
        before = recorded.environment.get("objects") or {}
    except DamagedError:
        return  # the run is continued, which says what is damaged
    for name, now in objects_of(config).items():
        if name in before and before[name].get("digest") != now["digest"]:
            raise ConfigError(
                f"{name}: the source or the values of {now['name']} changed since the run in {place} began "
                f"({cell}); put back what it began with, or choose another folder"
            )


def differs(name: str, old: Any, new: Any, place: Path, cell: str) -> str:
    """The message for a cell whose experiment is not the one of its run."""
    if is_own(old) and is_own(new) and old.rpartition("-")[0] == new.rpartition("-")[0]:
        what = f"the source or the values of {old.rpartition('-')[0]} changed since the run in {place} began"
        back = f"put back what it began with{why_other_values(name)}"
        return f"{name}: {what} ({cell}); {back}, or choose another folder"
    return (
        f"{name}: {new!r} would change the result of {place} ({cell}), which began with {old!r}; choose "
        f"another folder, or move this one away"
    )


def is_finished(entry: ManifestEntry, config_rounds: int, place: Path) -> str:
    """The digest of the final tensors of a cell that has all its rounds; empty: it has not."""
    if entry.sha256 and entry.rounds >= config_rounds and (place / TENSORS).exists():
        return entry.sha256
    return digest_if_finished(place, config_rounds) if (place / "config.yaml").exists() else ""
