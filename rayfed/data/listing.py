"""The listing of a data set that a reader returns: all samples without their content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rayfed.data.text import Text, Tokens
from rayfed.errors import DataError

ONE_DOMAIN = "all"
"""The domain of a data set that has no domains."""

Decoded: TypeAlias = NDArray[np.uint8] | tuple[NDArray[np.uint8], ...] | Text | Tokens
"""One sample: the array of its input, or of its input and its target; of a data set of texts a `Text`, which
`rayfed.data.tokens` makes `Tokens`."""


class BadImageError(DataError):
    """An image cannot be decoded; `data.on_bad_image=skip` leaves it out instead of stopping."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Listing:
    """All samples of a data set, without their content.

    Attributes:
        name: Name of the data set.
        classes: Class names; a label is an index into them.
        domains: Domain names.
        keys: Unique name of each sample, `domain/class/file`, the same on every machine.
        labels: int64, shape (N,).
        domain: Index into `domains`, int64, shape (N,).
        test: Whether a sample is in the official test split of the data set, bool, shape (N,); all False if
            there is none.
        fingerprint: A text that changes whenever a sample changes; computed without decoding.
        grouped: Whether samples whose keys differ in the last part only form a group, such as the slices of
            a patient; a partition keeps groups together (`rayfed.data.partition.groups`).
        owners: Name of the client of each sample, N names, for `data.partition.scheme=natural`; None if the
            data set names no clients.
        splits: Split that the data set gives each sample, uint8, shape (N,): 1: train, 2: val, 3: test, 0:
            none; None if it gives none. Under `data.partition.scheme=natural` clients keep them.
        test_name: Name that the data set gives its official test split, such as validation; empty: none.
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
    owners: Sequence[str] | None = None
    splits: NDArray[np.uint8] | None = None
    test_name: str = ""

    def __post_init__(self) -> None:
        """Check that all names can be shown on a terminal and in reports as they are.

        Raises:
            DataError: The name of a class, a domain or a client has control or direction characters.
        """
        named = {"class": self.classes, "domain": self.domains, "client": self.owners or ()}
        for what, names in named.items():
            for each in names:
                if not each.isprintable():
                    raise DataError(
                        f"data: the name {each!a} of a {what} of {self.name!r} has characters that "
                        f"cannot be printed; rename it in the data set"
                    )
