"""The rows of a trial: in each round the mean over its seeds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rayfed.errors import NonFiniteError
from rayfed.record.recorded_run import RecordedRun
from rayfed.types import Row


def mean_rows(folders: Iterable[Path], objectives: Sequence[str]) -> Iterator[Row]:
    """One row for each round that the runs in all these folders have finished."""
    for rows in zip(*(RecordedRun(folder).rounds for folder in folders), strict=False):
        yield mean_of(rows, objectives)


def mean_of(rows: Sequence[Row], objectives: Sequence[str]) -> Row:
    """One row for all seeds: the mean of every number, and the standard deviation of the objectives.

    >>> mean_of([{"round": 1, "accuracy": 0.25, "worst": "a"}, {"round": 1, "accuracy": 0.75, "worst": "b"}],
    ...     ["accuracy"])
    {'round': 1, 'accuracy': 0.5, 'accuracy_std': 0.25}
    """
    if len(rows) == 1:
        return dict(rows[0])
    merged: Row = {}
    for key, first in rows[0].items():
        values: list[Any] = [row.get(key) for row in rows]
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            mean = sum(values) / len(values)
            merged[key] = int(mean) if isinstance(first, int) and mean == int(mean) else mean
            if key in objectives:
                merged[f"{key}_std"] = (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5
        elif None in values and any(isinstance(v, int | float) for v in values):
            merged[key] = None  # of one seed it was not finite, so the mean is not
        elif all(v == first for v in values):
            merged[key] = first
    return merged


def check_objectives(row: Row, objectives: Sequence[str]) -> None:
    """End a trial whose objective is not finite: it failed, and the searcher learns nothing from it.

    Raises:
        NonFiniteError: Names the objective and the round.
    """
    bad = [name for name in objectives if name in row and row[name] is None]
    if bad:
        raise NonFiniteError(f"{bad[0]} is not finite in round {row['round']}; narrow the space of train.lr")
