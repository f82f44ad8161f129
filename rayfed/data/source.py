"""What a reader gives, and how readers are found."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rayfed.data.config import DataConfig
from rayfed.errors import ConfigError, DataError, unknown


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
    """

    name: str
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    keys: Sequence[str]
    labels: NDArray[np.int64]
    domain: NDArray[np.int64]
    test: NDArray[np.bool_]
    fingerprint: str


class Source(Protocol):
    """A reader with its options. A file in `readers/` ends with `READER = <dataclass that does this>`.

    The fields of the dataclass are the keys of `DataConfig` that the reader wants to see.
    """

    @property
    def name(self) -> str:
        """Name of the data set."""

    def fingerprint(self) -> str:
        """What `scan().fingerprint` is now, as cheaply as possible; equal means that nothing changed."""

    def scan(self) -> Listing:
        """List the samples in an order that depends on their names only."""

    def decode(self, listing: Listing, index: int, size: int) -> NDArray[np.uint8]:
        """One image as RGB, shape (size, size, 3). Must be safe to call from several threads.

        Raises:
            BadImageError: The image is corrupt; the message names its path.
        """


def readers() -> list[str]:
    """Names of the readers that come with the package."""
    import rayfed.data.readers as package

    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def make_source(config: DataConfig) -> Source:
    """The reader that a config names, with the options it wants.

    Raises:
        ConfigError: There is no such reader, or the reader refuses its options.
    """
    reader = _find(config.reader)
    options = [option.name for option in fields(reader) if option.init]
    for key, what in (("classes", "choose classes"), ("aliases", "rename folders")):
        if getattr(config, key) is not None and key not in options:
            raise ConfigError(f"data.{key}: the reader {config.reader!r} cannot {what}; leave it out")
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


def _find(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not attribute:
        if name not in readers():
            raise ConfigError(unknown("data.reader", name, readers()))
        module, attribute = f"rayfed.data.readers.{name}", "READER"
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(f"data.reader: {name!r} cannot be loaded ({error}); give module:NAME") from error
