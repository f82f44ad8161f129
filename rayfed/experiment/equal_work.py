"""Lets methods that are compared do as much work as each other, by more rounds of those that would do less.

Some methods take two batches for a step, train two models, or end a round before all clients have answered.
Compared with them over as many rounds, a method that trains less looks worse because it trains less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from rayfed.columns import Unit
from rayfed.engine.measure_work import Work, work_of_rounds
from rayfed.engine.setup import Setup
from rayfed.errors import ConfigError, unknown

UNITS = get_args(Unit)
"""All units."""

MOST = 100
"""Most times as many rounds that a row may get."""


@dataclass(frozen=True, kw_only=True)
class RunWork:
    """The expected work of a run.

    Attributes:
        rounds: Number of its rounds.
        first: Work of the first round, in some unit.
        later: Work of each later one.
    """

    rounds: int
    first: float
    later: float

    def after(self, rounds: int) -> float:
        """The work of so many rounds."""
        return self.first + (rounds - 1) * self.later

    def times(self, factor: float) -> int:
        """So many times the number of rounds, at least one."""
        return max(1, round(self.rounds * factor))


def checked_unit(value: Any) -> Unit | None:
    """The unit of what is to be equal; None: nothing is.

    Raises:
        ConfigError: It is none of `UNITS`.
    """
    if value is None or value in UNITS:
        unit: Unit | None = value
        return unit
    raise ConfigError(unknown("equal", str(value), UNITS))


def expected_work(setup: Setup, name: str, unit: Unit) -> RunWork:
    """The work of a prepared run, from a few visits of small clients.

    Args:
        setup: The run.
        name: Name of its row, for messages.
        unit: What is counted.

    Raises:
        ConfigError: The operations of its model cannot be counted.
        RayFedError: A client failed.
    """
    first, later = (_in_unit(work, name, unit) for work in work_of_rounds(setup))
    return RunWork(rounds=setup.experiment.rounds, first=first, later=later)


def _in_unit(work: Work, name: str, unit: Unit) -> float:
    value: float | None = getattr(work, unit)
    if value is None:
        raise ConfigError(
            f"equal: {unit}: the operations of {name} cannot be counted; set equal=examples, steps or bytes"
        )
    return value


def equal_rounds(rows: Mapping[str, Sequence[RunWork]], unit: Unit) -> dict[str, list[int]]:
    """The rounds of each run with which all rows do as much work as the one that does most, to half a round.

    Args:
        rows: The runs of each row, such as the parts of a protocol; a row without work keeps its rounds.
        unit: What is counted.

    Raises:
        ConfigError: A row would need more than `MOST` times its rounds.
    """
    totals = {name: sum(run.after(run.rounds) for run in runs) for name, runs in rows.items()}
    most = max(totals, key=lambda name: totals[name])
    found = {}
    for name, runs in rows.items():
        if not totals[name]:
            found[name] = [run.rounds for run in runs]
            continue
        if totals[most] > MOST * totals[name]:
            raise ConfigError(
                f"equal: {unit}: {name} would need {totals[most] / totals[name]:,.0f} times its rounds for "
                f"as many {unit} as {most}; leave one of the two out, or choose another unit"
            )
        found[name] = _nearest(runs, totals[most])
    return found


def _nearest(runs: Sequence[RunWork], wanted: float) -> list[int]:
    """Rounds of runs, in the proportions that they have, whose work together is nearest to what is wanted."""
    longest = max(run.rounds for run in runs)

    def rounds_of(number: int) -> list[int]:
        return [run.times(number / longest) for run in runs]

    def distance(number: int) -> float:
        return abs(
            sum(run.after(rounds) for run, rounds in zip(runs, rounds_of(number), strict=True)) - wanted
        )

    each = sum(run.later * run.rounds / longest for run in runs)
    about = 1 + round((wanted - sum(run.first for run in runs)) / each) if each else longest
    return rounds_of(min(range(max(1, about - 2), max(1, about) + 3), key=distance))
