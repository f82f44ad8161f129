"""Row numbers of the splits of many clients in a few arrays, which processes of a machine share in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from rayfed.clients import ClientNames

Indices: TypeAlias = npt.NDArray[np.int64]
Splits: TypeAlias = Mapping[str, Indices]
"""Indices of samples in the data set, ascending, by name of the split."""


class Drawn(Protocol):
    """Clients whose rows are drawn when they are asked for (`rayfed.data.partition.population`)."""

    names: ClientNames

    def rows_of(self, client: str) -> Splits:
        """Row numbers by split. Raises KeyError for a name that is no client."""

    def used(self) -> Indices:
        """Row numbers that any client can have, in any order."""


class RowTable(Mapping[str, Splits]):
    """The splits of clients and sets by id, as a mapping that is a handful of arrays.

    A dictionary of dictionaries of arrays costs a process about a kilobyte for each client; of this table,
    Ray maps the arrays without a copy.
    """

    def __init__(self, splits: Mapping[str, Splits], drawn: Drawn | None = None) -> None:
        """Pack the splits; later changes of the argument have no effect.

        Args:
            splits: Row numbers by id and split.
            drawn: Further clients, whose rows are not stored but drawn.
        """
        self._kinds = tuple(dict.fromkeys(kind for own in splits.values() for kind in own))
        self._names = ClientNames(splits)
        self._drawn = drawn
        none = np.empty(0, dtype=np.int64)
        parts = [own.get(kind, none) for own in splits.values() for kind in self._kinds]
        self._has = np.array([kind in own for own in splits.values() for kind in self._kinds], dtype=bool)
        self._ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        self._rows: Indices = np.concatenate([none, *parts]).astype(np.int64, copy=False)

    def __getitem__(self, name: str) -> Splits:
        try:
            first = self._names.position(name) * len(self._kinds)
        except KeyError:
            if self._drawn is None:
                raise
            return self._drawn.rows_of(name)
        return {
            kind: self._rows[self._ends[i] : self._ends[i + 1]]
            for i, kind in enumerate(self._kinds, start=first)
            if self._has[i]
        }

    def listed(self) -> ClientNames:
        """Ids whose rows are stored."""
        return self._names

    def used(self) -> Indices:
        """Row numbers of all examples of all splits, each once, ascending."""
        return np.unique(self._rows if self._drawn is None else np.append(self._rows, self._drawn.used()))

    def __iter__(self) -> Iterator[str]:
        return chain(self._names, () if self._drawn is None else self._drawn.names)

    def __len__(self) -> int:
        return len(self._names) + (0 if self._drawn is None else len(self._drawn.names))
