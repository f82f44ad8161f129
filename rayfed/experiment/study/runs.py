"""The finished runs of a study, by coordinates and by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from rayfed.errors import shown
from rayfed.experiment.finished_run import Run
from rayfed.experiment.study.coordinates import Key, find_key


class Finished(Protocol):
    """A study, as far as its finished runs need it: `names`, `cells`, `finished` and `rows` as there."""

    names: tuple[str, ...]
    cells: dict[Key, Any]
    finished: dict[Key, Run]

    @property
    def rows(self) -> dict[str, list[Run]]:
        """The finished runs of each row of the tables, by its label."""


class Runs(Mapping[str, Sequence[Run]]):
    """The finished runs of a study.

    `runs[coordinates]` is one run: of a tuple in the order of `Study.names`, or of a dict. `runs[label]`
    are those of a row of the tables, in the order of the cells. Iterating yields the labels.
    """

    def __init__(self, study: Finished) -> None:
        self._study = study

    def __getitem__(self, at: Any) -> Any:
        names = self._study.names
        if isinstance(at, str) and len(names) > 1:
            rows = self._study.rows
            if at not in rows:
                raise KeyError(f"{at!r} is no row of the study; its rows are: {', '.join(rows)}")
            return rows[at]
        key = find_key(at, names)
        if key not in self._study.finished:
            known = "is not finished" if key in self._study.cells else "is no cell of the study"
            raise KeyError(f"the cell {shown(at)} {known}; the coordinates are {', '.join(names)}")
        return self._study.finished[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._study.rows)

    def __len__(self) -> int:
        return len(self._study.rows)
