"""The work of methods that are compared, and whether it is as equal as was asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from rayfed.columns import WORK, Unit, work_in
from rayfed.errors import count_of

Rounds = Sequence[Mapping[str, Any]]
"""The rows of the rounds of a run."""

COLUMNS = {
    "steps": "local_steps",
    "examples": "local_examples",
    "tokens": "local_tokens",
    "flops": "flops",
    "bytes": "bytes",
}
"""Names of columns of tables by unit of work."""


COUNTED = tuple(COLUMNS.values())
"""The same, without the units."""


def mean_work(runs: Sequence[Rounds]) -> dict[str, float | None]:
    """The work of the runs of a row, their mean, by the name of its column; None: it was not counted.

    Args:
        runs: The rows of the rounds of each run.
    """
    counted = {
        unit: [work_in(unit, rows) for rows in runs]
        if any(column.pattern in row for rows in runs for row in rows for column in WORK[unit])
        else []
        for unit in WORK
    }
    return {COLUMNS[unit]: fmean(values) if values else None for unit, values in counted.items()}


def equal_notes(settings: Sequence[Mapping[str, Sequence[Rounds]]], unit: Unit) -> Iterator[str]:
    """Notes on the work of methods that were to have as much of it as each other, one for each setting.

    Args:
        settings: The rows of the rounds of the runs of each method, in each setting.
        unit: What was to be equal.
    """
    for methods in settings:
        totals = {name: sum(work_in(unit, rows) for rows in runs) for name, runs in methods.items()}
        rounds = {name: max(map(len, runs)) for name, runs in methods.items()}
        trained = {name: total for name, total in totals.items() if total}
        if len(trained) < 2:
            continue
        each = {name: total / rounds[name] for name, total in trained.items()}
        words = (
            f"{name} {total:,.0f} in {count_of(rounds[name], 'round')} of {each[name]:,.0f}"
            for name, total in trained.items()
        )
        yield f"equal={unit}, to one round: {'; '.join(words)}"
        most = max(trained, key=lambda name: trained[name])
        for name, total in trained.items():
            if trained[most] - total > max(each[name], each[most]):
                yield (
                    f"{name} has {1 - total / trained[most]:.0%} fewer {unit} than {most}, more than a "
                    f"round: its rounds differ from those that were tried before the run"
                )
