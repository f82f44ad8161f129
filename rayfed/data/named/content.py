"""The content of a data set, its listing, and the base of the readers that find the content first."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayfed.data.source import ONE_DOMAIN, Listing, choose_classes
from rayfed.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True, eq=False)
class Content:
    """N samples as a reader finds them.

    Attributes:
        classes: Names of the classes.
        labels: Class of each sample, int64, shape (N,).
        test: Whether it is in the official test split, bool, shape (N,).
        names: Unique name of each sample within its domain and class, N names.
        images: What is decoded of each sample, N.
        domains: Names of the domains.
        domain: Index into `domains` of each sample, int64, shape (N,); None: all have the first.
        owners: Client of each sample; None if the data name no clients.
        test_name: Name of the official test split, see `rayfed.data.listing.Listing`.
    """

    classes: Sequence[str]
    labels: NDArray[np.int64]
    test: NDArray[np.bool_]
    names: Sequence[str]
    images: Sequence[Any]
    domains: Sequence[str] = (ONE_DOMAIN,)
    domain: NDArray[np.int64] | None = None
    owners: Sequence[str] | None = None
    test_name: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Chosen:
    """The samples of the chosen classes.

    Attributes:
        rows: Their places in the content, ascending, shape (M,).
        listing: Their listing.
    """

    rows: NDArray[np.int64]
    listing: Listing


@dataclass(frozen=True, kw_only=True)
class ContentReader(ABC):
    """Lists the chosen classes of what `_content` holds; a reader adds `decode`."""

    name: str
    root: str | None
    classes: Sequence[str] | int | None = None

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of what determines the samples and their order."""

    @property
    @abstractmethod
    def _content(self) -> Content:
        """All samples, read once."""

    def scan(self) -> Listing:
        return self._chosen.listing

    def _image(self, index: int) -> Any:
        """The stored image of a listed sample, before it is decoded."""
        return self._content.images[int(self._chosen.rows[index])]

    @cached_property
    def _chosen(self) -> Chosen:
        return choose(self.name, self._content, self.classes, self.fingerprint())


def choose(name: str, content: Content, wanted: Sequence[str] | int | None, fingerprint: str) -> Chosen:
    """List the samples of the chosen classes.

    Args:
        name: Name of the data set.
        content: All of its samples.
        wanted: The value of `data.classes`.
        fingerprint: Fingerprint of the files and of `wanted`.

    Raises:
        ConfigError: A class does not exist.
        DataError: There are no samples, or a label has no class.
    """
    if not len(content.labels):
        raise DataError(f"data.root: {name} has no samples there; download it again")
    if content.labels.min() < 0 or content.labels.max() >= len(content.classes):
        raise DataError(
            f"data.root: {name} has labels from {content.labels.min()} to {content.labels.max()}, but "
            f"{len(content.classes)} classes; download it again"
        )
    classes = choose_classes(wanted, content.classes)
    place = {content.classes.index(own): label for label, own in enumerate(classes)}
    new = np.array([place.get(label, -1) for label in range(len(content.classes))], dtype=np.int64)
    rows = np.flatnonzero(new[content.labels] >= 0)
    labels = new[content.labels[rows]]
    domain = np.zeros(len(content.labels), dtype=np.int64) if content.domain is None else content.domain
    safe = [own.replace("/", "-") for own in classes]
    keys = [
        f"{content.domains[d]}/{safe[label]}/{content.names[row]}"
        for row, label, d in zip(rows.tolist(), labels.tolist(), domain[rows].tolist(), strict=True)
    ]
    owners = content.owners
    listing = Listing(
        name=name,
        classes=tuple(classes),
        domains=tuple(content.domains),
        keys=keys,
        labels=labels,
        domain=domain[rows],
        test=content.test[rows],
        fingerprint=fingerprint,
        owners=None if owners is None else [owners[row] for row in rows.tolist()],
        test_name=content.test_name,
    )
    return Chosen(rows=rows, listing=listing)


def with_classes(fingerprint: str, wanted: Sequence[str] | int | None) -> str:
    """The fingerprint of the files and of the value of `data.classes`."""
    return fingerprint if wanted is None else f"{fingerprint}:{wanted}"


def stat_hash(files: Iterable[Path], root: Path) -> str:
    """A hash of the names, sizes and modification times of files below a folder.

    Raises:
        DataError: A file is missing or cannot be read.
    """
    out = hashlib.sha256()
    for file in files:
        try:
            about = file.stat()
        except OSError as err:
            raise DataError(f"data.root: {file} cannot be read ({err.strerror})") from err
        out.update(f"{file.relative_to(root)}\t{about.st_size}\t{about.st_mtime_ns}\n".encode())
    return out.hexdigest()


def folder_of(root: str | None, needed: Sequence[str], where: str) -> Path:
    """The folder `data.root`, in which everything that is needed is present.

    Args:
        root: The value of `data.root`.
        needed: Paths below the folder that must exist.
        where: What to download, from whom, and where it must lie.

    Raises:
        ConfigError: `data.root` is not set.
        DataError: Something is missing; one line says what to download.
    """
    if not root:
        raise ConfigError(f"data.root: not set; {where}")
    folder = Path(root).expanduser().absolute()
    if missing := [name for name in needed if not (folder / name).exists()]:
        raise DataError(f"data.root: {folder / missing[0]} does not exist; {where}")
    return folder
