"""The interface of readers, and how a reader is found by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from rayfed.data.data_config import DataConfig, Resize
from rayfed.data.listing import ONE_DOMAIN as ONE_DOMAIN
from rayfed.data.listing import BadImageError as BadImageError
from rayfed.data.listing import Decoded as Decoded
from rayfed.data.listing import Listing as Listing
from rayfed.data.user_data import OwnData, make_reader
from rayfed.errors import ConfigError, DataError, unknown
from rayfed.objective import CLASSES, CLASSIFICATION
from rayfed.registry import READER_FILES, Registry


class Source(Protocol):
    """A reader of a data set: a dataclass with these methods, which a file in `readers/` names `READER`.

    The fields of the dataclass are the keys of `DataConfig` whose values it receives. A reader for another
    task than classification names the task in a class attribute `task` (`rayfed.objective`). A class
    attribute `sparse = True` says that domains need not have samples of every class.
    """

    @property
    def name(self) -> str:
        """Name of the data set."""

    def fingerprint(self) -> str:
        """The current value of `scan().fingerprint`, computed as cheaply as possible."""

    def scan(self) -> Listing:
        """List the samples in an order that depends on their keys only."""

    def decode(self, listing: Listing, index: int, size: int) -> Decoded:
        """Decode one sample: an RGB image, uint8, shape (size, size, 3). Several threads call this at once.

        For other tasks than classification: one array for each field of the `layout` of the task, or for
        tasks with texts a `Text`, whatever the size.

        Args:
            listing: The listing that `scan` returned.
            index: Index of the sample.
            size: Height and width of the image in pixels, or characters in a window.

        Raises:
            BadImageError: The image is corrupt; the message names its path.
        """


MAX_TEXT_BYTES = 100_000_000
"""Size of the largest list of images that is read, in bytes."""


def read_list(path: Path) -> list[str]:
    """Read the lines of a text file.

    Raises:
        DataError: It is not UTF-8 text, is too large, or cannot be read.
    """
    try:
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise DataError(
                f"data.root: {path} is larger than {MAX_TEXT_BYTES // 1_000_000} MB; is it a list?"
            )
        return path.read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as err:
        raise DataError(f"data.root: the list {path} cannot be read ({err})") from err


def check_inside(name: str, where: str) -> None:
    """Check that a path in a list stays within the folder it is relative to.

    Args:
        name: The path.
        where: File and line of the list, for the message.

    Raises:
        DataError: The path is absolute, has empty parts or `..`, or characters that cannot be printed.
    """
    parts = name.replace("\\", "/").split("/")
    if not name.isprintable() or not all(parts) or {".", ".."} & set(parts) or ":" in parts[0]:
        raise DataError(f"data.root: {where} names {name!r}, which is not a path inside the folder")


def task_of(source: Source) -> str:
    """The task of a reader's data, a name of `rayfed.objective`."""
    return str(getattr(source, "task", CLASSIFICATION))


KEYS = {"aliases": "rename folders", "columns": "choose columns"}
"""Keys of the config that only some readers have, and what these do with them."""


Reader: TypeAlias = type[Source] | OwnData
"""A class whose instances read data, with fields that are keys of the config, or the examples of a user."""


def make_source(config: DataConfig, resize: Resize = "squash", reader: Reader | None = None) -> Source:
    """Make a reader, with the values of the config that it has fields for.

    Args:
        resize: How images become squares under `data.resize=auto`.
        reader: What the reader is made of; None: what the config names.

    Raises:
        ConfigError: There is no such reader, or it cannot use `data.root`, `data.aliases`, `data.columns` or
            `data.resize`.
    """
    reader = READERS.load(config.reader) if reader is None else reader
    if isinstance(reader, OwnData):
        return replace(reader, resize=resize if config.resize == "auto" else config.resize)
    options = _options(reader)
    for key, what in KEYS.items():
        if getattr(config, key) is not None and key not in options:
            raise ConfigError(f"data.{key}: the reader {config.reader!r} cannot {what}; leave it out")
    if config.root is not None and "root" not in options:
        raise ConfigError(
            f"data.root: {config.root!r} would not be read: the reader {config.reader!r} brings its images "
            f"along; leave it out, or choose another data set"
        )
    if config.resize == "crop" and "resize" not in options:
        raise ConfigError(
            f"data.resize: 'crop' has no effect: the reader {config.reader!r} decodes no image "
            f"files; leave it out"
        )
    values = {**vars(config), "resize": resize if config.resize == "auto" else config.resize}
    return reader(**{option: values[option] for option in options})


def brings_data(config: DataConfig) -> bool:
    """Whether the reader of a config brings its data along, so that there is no `data.root` to set."""
    reader = READERS.load(config.reader)
    return isinstance(reader, OwnData) or "root" not in _options(reader)


def _options(reader: type[Any]) -> list[str]:
    """Keys of the config that a reader has fields for."""
    return [option.name for option in fields(reader) if option.init]


def choose_classes(
    wanted: Sequence[str] | int | None, present: Sequence[str], key: str = "data.classes"
) -> list[str]:
    """The classes to use, in the order of their labels.

    Args:
        wanted: The value of `data.classes`: names in this order, a number of first classes, or None for all.
        present: Names of all classes of the data set.
        key: Key of the config that `wanted` is the value of.

    Raises:
        ConfigError: The list is empty, a class in it does not exist or is listed twice, or there are fewer
            than the number.
    """
    if wanted is None:
        return list(present)
    if isinstance(wanted, int):
        if not 1 <= wanted <= len(present):
            raise ConfigError(f"{key}: {wanted} of {len(present)} classes; use a number of 1..{len(present)}")
        return list(present[:wanted])
    if not wanted:
        raise ConfigError(f"{key}: [] chooses no class; list some of them, or leave it out")
    for position, name in enumerate(wanted):
        if name not in present:
            raise ConfigError(unknown(key, name, present))
        if name in wanted[:position]:
            raise ConfigError(f"{key}: {name!r} is listed twice; list each class once")
    return list(wanted)


READERS = Registry(
    files=READER_FILES,
    attribute="READER",
    key="data.reader",
    accepts=lambda value: isinstance(value, OwnData) or (isinstance(value, type) and is_dataclass(value)),
    expected="a reader, which is a dataclass, or examples by client",
    made=make_reader,
)


def source_of(
    config: DataConfig,
    resize: Resize = "squash",
    reader: Reader | None = None,
    goal: str | None = None,
) -> Source:
    """A reader (`make_source`), of the chosen classes only.

    Args:
        resize: How images become squares under `data.resize=auto`.
        reader: As of `make_source`.
        goal: The task that the config names, for examples of a user; None: it follows from their targets.

    Raises:
        ConfigError: As `make_source`; or `data.classes` is set for a task without classes to choose.
    """
    source = make_source(config, resize, reader)
    if isinstance(source, OwnData):
        source = source.of_task(goal)
    if config.classes is None or hasattr(source, "classes"):
        return source
    if task_of(source) not in CLASSES:
        raise ConfigError(
            f"data.classes: {config.name!r} is for {task_of(source)}, which needs all of its classes; "
            f"leave it out"
        )
    if isinstance(source, OwnData):
        return source.of_classes(choose_classes(config.classes, source.scan().classes))
    return ChosenClasses(source=source, classes=config.classes)


@dataclass(frozen=True, kw_only=True)
class ChosenClasses:
    """A reader that lists the samples of some classes of another one; a label is an index into these classes.

    Attributes:
        source: The other reader, of a data set for classification.
        classes: The value of `data.classes`.
    """

    source: Source
    classes: Sequence[str] | int

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def resize(self) -> str:
        """The way in which images become squares."""
        return str(getattr(self.source, "resize", "squash"))

    @property
    def said(self) -> str:
        """The sentence of the other reader about its columns; empty: none."""
        return str(getattr(self.source, "said", ""))

    def place(self, key: str) -> str:
        """Words for a sample, for messages, as of the other reader. Args: key: that of the listing."""
        place = getattr(self.source, "place", None)
        return str(place(key)) if place else f"text {key} of {self.name}"

    @property
    def sparse(self) -> bool:
        """Whether domains need not have samples of every class."""
        return bool(getattr(self.source, "sparse", False))

    def fingerprint(self) -> str:
        chosen = json.dumps(self.classes if isinstance(self.classes, int) else list(self.classes))
        return hashlib.sha256(f"{self.source.fingerprint()}|{chosen}".encode()).hexdigest()

    def scan(self) -> Listing:
        whole = self._whole
        rows = self._rows
        place = {name: label for label, name in enumerate(self._names)}
        new = np.array([place.get(name, -1) for name in whole.classes], dtype=np.int64)
        return replace(
            whole,
            classes=tuple(self._names),
            keys=[whole.keys[row] for row in rows.tolist()],
            labels=new[whole.labels[rows]],
            domain=whole.domain[rows],
            test=whole.test[rows],
            fingerprint=self.fingerprint(),
            owners=None if whole.owners is None else [whole.owners[row] for row in rows.tolist()],
            splits=None if whole.splits is None else whole.splits[rows],
        )

    @property
    def task(self) -> str:
        return task_of(self.source)

    def decode(self, listing: Listing, index: int, size: int) -> Decoded:
        return self.source.decode(self._whole, int(self._rows[index]), size)

    @cached_property
    def _whole(self) -> Listing:
        return self.source.scan()

    @cached_property
    def _names(self) -> list[str]:
        return choose_classes(self.classes, self._whole.classes)

    @cached_property
    def _rows(self) -> np.ndarray:
        """Places of the samples in the listing of the other reader, ascending."""
        wanted = np.array([name in self._names for name in self._whole.classes])
        return np.flatnonzero(wanted[self._whole.labels])
