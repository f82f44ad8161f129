"""Prepared data sets: one Arrow file of decoded inputs, which every process maps into memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayfed.arrow_columns import numbers
from rayfed.data import arrow_file
from rayfed.data.text import Inputs, Targets
from rayfed.errors import DataError
from rayfed.objective import CLASSES, CLASSIFICATION, objective
from rayfed.user_files import parse_json


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """A prepared data set. It is pickled as its path, so that another process of the node maps the same file.

    Attributes:
        name: Name of the data set.
        classes: Class names; a label is an index into them.
        domains: Domain names.
        images: The inputs, a read-only view of the memory map: RGB, uint8, shape (N, size, size, 3), or in
            the layout of the task (`rayfed.objective`); texts of different lengths as tokens.
        labels: int64, shape (N,), read-only.
        domain: Index into `domains`, int64, shape (N,), read-only.
        test: Whether a sample is in the official test split of the data set, bool, shape (N,), read-only.
        digest: sha256 of images, keys, labels, domains and test flags; equal content has an equal digest on
            every machine.
        skipped: Number of images left out because they could not be decoded.
        size: Height and width of the images in pixels, characters in a window, or most tokens of a text.
        path: The Arrow file.
        key_column: The keys as an Arrow array.
        masks: Targets that are arrays, shape (N, ...), or tokens; None if the targets are the labels.
        task: The task of the data, a name of `rayfed.objective`.
        grouped: Whether samples form groups, see `rayfed.data.source.Listing`.
        owner_column: Names of the clients as an Arrow array; None if the data set names none.
        splits: Split that the data set gives each sample, see `rayfed.data.listing.Listing`; None: none.
        flaws: What was cut of each text and the like, `flaw_bits`, shape (N,); None: no texts.
        own: Whether inputs have another type and shape than the task's, as those that a user handed over.
        test_name: Name of the official test split, see `rayfed.data.listing.Listing`.
        said: What was found in a table of a user, for the header of a run; empty: nothing.
    """

    name: str
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    images: NDArray[np.uint8] | Inputs
    labels: NDArray[np.int64]
    domain: NDArray[np.int64]
    test: NDArray[np.bool_]
    digest: str
    skipped: int
    size: int
    path: Path
    key_column: Any
    masks: NDArray[Any] | Targets | None = None
    task: str = CLASSIFICATION
    grouped: bool = False
    owner_column: Any = None
    splits: NDArray[np.uint8] | None = None
    own: bool = False
    test_name: str = ""
    said: str = ""
    flaws: NDArray[np.uint8] | None = None

    @cached_property
    def keys(self) -> list[str]:
        """The key of each sample, `domain/class/file`."""
        return self.key_column.to_pylist()

    @property
    def owners(self) -> list[str]:
        """Name of the client of each sample, for `data.partition.scheme=natural`; empty if there are none."""
        return [] if self.owner_column is None else self.owner_column.to_pylist()

    @property
    def targets(self) -> NDArray[Any] | Targets:
        """The targets of training: masks, uint8, shape (N, H, W), tokens, or labels, int64, shape (N,)."""
        return self.labels if self.masks is None else self.masks

    def __len__(self) -> int:
        return len(self.labels)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_dataset, (self.path,)


def open_dataset(path: Path) -> Dataset:
    """Map a prepared data set into memory, without reading its images.

    Raises:
        DataError: The file is missing, damaged or incomplete.
    """
    import pyarrow as pa

    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        about = parse_json(reader.schema.metadata[arrow_file.META])
        batch = reader.get_batch(0)
        _check_batch(batch, about)
        return _dataset(path, about, batch)
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as err:
        raise DataError(f"{path} is not a prepared data set ({err}); delete it and run again") from err


def _check_batch(batch: Any, about: dict[str, Any]) -> None:
    """Raise ValueError if a column is damaged or a label, domain or test flag is out of range."""
    if not len(batch):
        raise ValueError("it holds no image")
    batch.validate()
    for name in {"key", "owner"} & set(batch.schema.names):
        batch.column(name).validate(full=True)
    labels = [("label", "classes")] if about.get("task", CLASSIFICATION) in CLASSES else []
    for column, names in (*labels, ("domain", "domains")):
        values = numbers(batch.column(column))
        if values.min() < 0 or values.max() >= len(about[names]):
            raise ValueError(f"a {column} is outside of its {len(about[names])} {names}")
    if numbers(batch.column("test")).max() > 1:
        raise ValueError("a test flag is neither 0 nor 1")


def _dataset(path: Path, about: dict[str, Any], batch: Any) -> Dataset:
    task = about.get("task", CLASSIFICATION)
    own = [(name, kind, tuple(shape)) for name, kind, shape in about.get("layout", ())]
    inputs: Any
    masks: Any
    if objective(task).tokens:
        inputs, masks = arrow_file.inputs_of(batch, about["size"])
    else:
        rows = arrow_file.rows_of(batch, np.dtype(own) if own else objective(task).layout(about["size"]))
        inputs, masks = rows["input"], rows["target"] if "target" in (rows.dtype.names or ()) else None
    return Dataset(
        name=about["name"],
        classes=tuple(about["classes"]),
        domains=tuple(about["domains"]),
        images=inputs,
        labels=numbers(batch.column("label")),
        domain=numbers(batch.column("domain")),
        test=numbers(batch.column("test")).view(np.bool_),
        digest=about["digest"],
        skipped=int(about["skipped"]),
        size=about["size"],
        path=path,
        key_column=batch.column("key"),
        masks=masks,
        task=task,
        grouped=bool(about.get("grouped")),
        owner_column=batch.column("owner") if "owner" in batch.schema.names else None,
        splits=numbers(batch.column("split")) if "split" in batch.schema.names else None,
        own=bool(own),
        test_name=about.get("test_name", ""),
        said=about.get("said", ""),
        flaws=numbers(batch.column("flaws")) if "flaws" in batch.schema.names else None,
    )
