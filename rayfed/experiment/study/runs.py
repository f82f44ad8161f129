"""The finished runs of a study, by coordinates and by row of its tables."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from rayfed.errors import shown
from rayfed.experiment.finished_run import Run
from rayfed.experiment.study.coordinates import Key, find_key


class Runs(Mapping[str, Sequence[Run]]):
    """The finished runs of a study.

    `runs[coordinates]` is one run: of a tuple in the order of `Study.names`, or of a dict. `runs[label]`
    are those of a row of the tables, in the order of the cells. Iterating yields the labels.
    """

    def __init__(
        self,
        names: Sequence[str],
        cells: Collection[Key],
        finished: Mapping[Key, Run],
        rows: Mapping[str, Sequence[Run]],
    ) -> None:
        """Take the runs.

        Args:
            names: Names of the coordinates.
            cells: All cells.
            finished: The finished runs by coordinates.
            rows: The same by row.
        """
        self._names, self._cells, self._finished, self._rows = names, cells, finished, rows

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, str) and len(self._names) > 1:
            if at not in self._rows:
                raise KeyError(f"{at!r} is no row of the study; its rows are: {', '.join(self._rows)}")
            return self._rows[at]
        key = find_key(at, self._names)
        if key not in self._finished:
            known = "is not finished" if key in self._cells else "is no cell of the study"
            raise KeyError(f"the cell {shown(at)} {known}; the coordinates are {', '.join(self._names)}")
        return self._finished[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
