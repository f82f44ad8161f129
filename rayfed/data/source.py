"""What a reader gives, and how readers are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rayfed.data.config import DataConfig
from rayfed.errors import ConfigError, DataError, unknown
from rayfed.objective import CLASSIFICATION
from rayfed.registry import READER_FILES, Registry

Decoded: TypeAlias = NDArray[np.uint8] | tuple[NDArray[np.uint8], ...]
"""An input alone, or an input and its target."""


class BadImageError(DataError):
    """One image cannot be decoded; `data.on_bad_image: skip` leaves it out."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Listing:
    """Every sample of a data set, nothing decoded.

    Attributes:
        name: Name of the data set.
        classes: Class names; a label is an index into them.
        domains: Domain names.
        keys: One per sample, `domain/class/file`, the same on every machine.
        labels: int64, shape (N,).
        domain: Index into `domains`, int64, shape (N,).
        test: Whether the sample is in the data set's own test split, bool, shape (N,); all False without one.
        fingerprint: Changes whenever a sample does; cheap to compute.
        grouped: Whether samples whose keys differ in the last part only belong together, such as slices of
            a patient; a partition then deals them as one (`rayfed.data.partition.groups`).
    """

    name: str
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    keys: Sequence[str]
    labels: NDArray[np.int64]
    domain: NDArray[np.int64]
    test: NDArray[np.bool_]
    fingerprint: str
    grouped: bool = False


class Source(Protocol):
    """A reader with its options. A file in `readers/` ends with `READER = <dataclass that does this>`.

    The fields of the dataclass are the keys of `DataConfig` that the reader wants to see. A reader for
    another task than classification names it in a class attribute `task` (`rayfed.objective`).
    """

    @property
    def name(self) -> str:
        """Name of the data set."""

    def fingerprint(self) -> str:
        """What `scan().fingerprint` is now, as cheaply as possible; equal means that nothing changed."""

    def scan(self) -> Listing:
        """List the samples in an order that depends on their names only."""

    def decode(self, listing: Listing, index: int, size: int) -> Decoded:
        """One image as RGB, shape (size, size, 3). Must be safe to call from several threads.

        For other tasks: what their `layout` says, one array for each of its fields.

        Raises:
            BadImageError: The image is corrupt; the message names its path.
        """


MAX_TEXT_BYTES = 100_000_000
"""Largest list of images that is read."""


def read_list(path: Path) -> list[str]:
    """The lines of a text file.

    Raises:
        DataError: It is not UTF-8 text, is too large, or cannot be read.
    """
    try:
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise DataError(
                f"data.root: {path} is larger than {MAX_TEXT_BYTES // 1_000_000} MB; is it a list?"
            )
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.root: the list {path} cannot be read ({error})") from error


def check_inside(name: str, where: str) -> None:
    """Raise DataError for a path in a list that could leave the folder it is relative to."""
    parts = name.replace("\\", "/").split("/")
    if not name.isprintable() or not all(parts) or {".", ".."} & set(parts) or ":" in parts[0]:
        raise DataError(f"data.root: {where} names {name!r}, which is not a path inside the folder")


def task_of(source: Source) -> str:
    """The task that a reader's data are for."""
    return str(getattr(source, "task", CLASSIFICATION))


def make_source(config: DataConfig) -> Source:
    """The reader that a config names, with the options it wants.

    Raises:
        ConfigError: There is no such reader, or the reader refuses its options.
    """
    reader = READERS.load(config.reader)
    options = [option.name for option in fields(reader) if option.init]
    for key, what in (("classes", "choose classes"), ("aliases", "rename folders")):
        if getattr(config, key) is not None and key not in options:
            raise ConfigError(f"data.{key}: the reader {config.reader!r} cannot {what}; leave it out")
    if config.root is not None and "root" not in options:
        raise ConfigError(
            f"data.root: {config.root!r} would not be read: the reader {config.reader!r} brings its images "
            f"along; leave it out, or choose another data set"
        )
    return reader(**{option: getattr(config, option) for option in options})


def choose_classes(wanted: Sequence[str] | int | None, found: Sequence[str]) -> list[str]:
    """The classes to use: those that `data.classes` lists, in its order; the first so many; or all.

    Raises:
        ConfigError: A class does not exist or is listed twice, or there are not so many.
    """
    if wanted is None:
        return list(found)
    if isinstance(wanted, int):
        if not 1 <= wanted <= len(found):
            raise ConfigError(
                f"data.classes: {wanted} of {len(found)} classes; use a number of 1..{len(found)}"
            )
        return list(found[:wanted])
    for position, name in enumerate(wanted):
        if name not in found:
            raise ConfigError(unknown("data.classes", name, found))
        if name in wanted[:position]:
            raise ConfigError(f"data.classes: {name!r} is listed twice; list each class once")
    return list(wanted)


READERS = Registry(
    files=READER_FILES,
    attribute="READER",
    key="data.reader",
    accepts=lambda found: isinstance(found, type) and is_dataclass(found),
    expected="a reader, which is a dataclass",
)
