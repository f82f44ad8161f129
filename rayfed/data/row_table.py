"""Row numbers of the splits of many clients in a few arrays, which processes of a machine share in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from rayfed.data.examples import Indices, Splits


class RowTable(Mapping[str, Splits]):
    """The splits of clients and sets by id, as a mapping that is a handful of arrays.

    A dictionary of dictionaries of arrays costs a process about a kilobyte for each client; of this table,
    Ray maps the arrays without a copy.
    """

    def __init__(self, splits: Mapping[str, Splits]) -> None:
        """Pack the splits; later changes of the argument have no effect."""
        self._kinds = tuple(dict.fromkeys(kind for own in splits.values() for kind in own))
        self._names: npt.NDArray[np.bytes_] = np.array([name.encode() for name in splits], dtype=np.bytes_)
        self._order = np.argsort(self._names, kind="stable")
        none = np.empty(0, dtype=np.int64)
        parts = [own.get(kind, none) for own in splits.values() for kind in self._kinds]
        self._has = np.array([kind in own for own in splits.values() for kind in self._kinds], dtype=bool)
        self._ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        self._rows: Indices = np.concatenate([none, *parts]).astype(np.int64, copy=False)

    def __getitem__(self, name: str) -> Splits:
        wanted = np.bytes_(name.encode())
        place = int(np.searchsorted(self._names, wanted, sorter=self._order))
        if place == len(self._names) or self._names[self._order[place]] != wanted:
            raise KeyError(name)
        first = int(self._order[place]) * len(self._kinds)
        return {
            kind: self._rows[self._ends[i] : self._ends[i + 1]]
            for i, kind in enumerate(self._kinds, start=first)
            if self._has[i]
        }

    def __iter__(self) -> Iterator[str]:
        return (name.decode() for name in self._names.tolist())

    def __len__(self) -> int:
        return len(self._names)
