"""Values that were chosen for methods before these were compared, in the manifest and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayfed.columns import VALIDATED, share_of
from rayfed.errors import count_of
from rayfed.terminal.table_formats import Cell, Column, Table

RATE = "train.lr"
"""The rate of the clients, which is tuned for every method."""


@dataclass(frozen=True, kw_only=True)
class TunedMethod:
    """The trials of a method, and the values chosen.

    Attributes:
        trials: Number of trials; 0: the method trains nothing.
        values: The chosen values by key.
        score: Validation score of the chosen trial after all rounds, a mean over seeds and parts.
        ranges: The smallest and the largest value that were tried, by key.
        ends: The keys whose chosen value is at an end of its range.
        untuned: Why no main hyperparameter was tuned; empty: one was.
    """

    trials: int
    values: Mapping[str, float | None] = field(default_factory=dict)
    score: float | None = None
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    ends: list[str] = field(default_factory=list)
    untuned: str = ""

    def in_words(self) -> str:
        """The chosen values, such as `train.lr=0.03, local.mu=0.1`."""
        return ", ".join(f"{key}={value}" for key, value in self.values.items()) or "nothing to tune"

    def ends_in_words(self) -> list[str]:
        """The chosen values at an end of their ranges, such as `local.mu=1 (tried: 0.001 to 1)`."""
        return [
            f"{key}={self.values[key]} (tried: {self.ranges[key][0]:g} to {self.ranges[key][1]:g})"
            for key in self.ends
        ]


@dataclass(frozen=True, kw_only=True)
class TunedValues:
    """The tuning of all methods of a study.

    Attributes:
        trials: Number of trials of each method.
        score: The column that trials were compared by.
        seeds: The seeds of the trials, none of which is compared.
        compared: The seeds on which the chosen values are compared.
        rounds: Shares of a run after which the better half of the trials goes on.
        methods: What was chosen, by the name of the method.
    """

    trials: int
    score: str
    seeds: list[int]
    compared: list[int]
    rounds: list[float]
    methods: Mapping[str, TunedMethod]

    @classmethod
    def read(cls, tree: Mapping[str, Any]) -> TunedValues:
        """The same from plain containers, as `plain` gives them."""
        methods = {}
        for name, values in tree["methods"].items():
            ranges = {key: (low, high) for key, (low, high) in values["ranges"].items()}
            methods[name] = TunedMethod(**{**values, "ranges": ranges})
        return cls(**{**tree, "methods": methods})

    def plain(self) -> dict[str, Any]:
        """The same as plain containers."""
        methods = {name: dict(vars(each)) for name, each in self.methods.items()}
        return {**vars(self), "methods": methods}

    @property
    def notes(self) -> list[str]:
        """Notes on it for the table of the comparison."""
        shares = ", ".join(f"{100 * share:g} %" for share in self.rounds)
        chosen = "; ".join(f"{name}: {each.in_words()}" for name, each in self.methods.items())
        ends = [f"{name} {words}" for name, each in self.methods.items() for words in each.ends_in_words()]
        found = [
            f"tuned with {count_of(self.trials, 'trial')} for each method, by {self.score} on the "
            f"seeds {listed(self.seeds)}, of which the better half went on after {shares} of the rounds; "
            f"compared on the seeds {listed(self.compared)}",
            f"chosen: {chosen}",
        ]
        if ends:
            found.append(f"at the end of what was tried, so that more may be better: {'; '.join(ends)}")
        return found

    @property
    def table(self) -> Table:
        """A row for each method: its trials, chosen values, their score, and those at an end of a range."""
        percent = share_of(self.score.removeprefix(VALIDATED)) != 1
        columns = [
            Column("method", "text"),
            Column("trials", "count"),
            Column("chosen", "text"),
            Column(self.score, "percent" if percent else "number"),
            Column("at an end", "text"),
            Column("not tuned besides the rate", "text"),
        ]
        rows: list[list[Cell]] = [
            [name, each.trials, each.in_words(), each.score, "; ".join(each.ends_in_words()), each.untuned]
            for name, each in self.methods.items()
        ]
        return Table("Tuning", columns, rows, tuple(self.notes))


def listed(seeds: Sequence[int]) -> str:
    """Seeds in words.

    >>> listed([1000, 1001]), listed([0, 1, 2, 3])
    ('1000, 1001', '0 to 3')
    """
    whole = list(seeds)
    if len(whole) > 2 and whole == list(range(whole[0], whole[-1] + 1)):
        return f"{whole[0]} to {whole[-1]}"
    return ", ".join(map(str, whole))
