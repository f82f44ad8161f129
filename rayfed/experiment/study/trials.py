"""The trials of a search: their values and scores, in the folder of the study whose cells they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from rayfed.errors import ConfigError
from rayfed.experiment.study.cells import Study
from rayfed.experiment.study.coordinates import row_at, row_of
from rayfed.experiment.study.study_folder import Manifest
from rayfed.record.readers import STUDY, reading

if TYPE_CHECKING:
    import pandas as pd

    from rayfed.experiment.finished_run import Run

Direction: TypeAlias = Literal["max", "min"]
State: TypeAlias = Literal["finished", "stopped early", "failed", "unfinished"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A point of a space, with a cell for each seed.

    Attributes:
        number: Its place in the order of proposals.
        values: The value of each key; a key whose condition does not hold is left out.
        state: `finished`, `stopped early` by a rule, `failed` or `unfinished`.
        scores: The score of each objective, a mean over the seeds, by which it is compared; empty: it is not.
        error: Why it failed; empty: it did not.
    """

    number: int
    values: Mapping[str, Any]
    state: State = "unfinished"
    scores: Mapping[str, float | None] = field(default_factory=dict)
    error: str = ""


T = TypeVar("T", bound=Trial)


@dataclass(frozen=True, kw_only=True)
class Trials:
    """The trials of a search, in the order in which they were proposed.

    Attributes:
        objectives: Which values of each compared column are better; the first one chooses the best trial.
        space: What is searched, in words, by key.
        trials: The trials.
        name: Name of the search; may be empty.
    """

    objectives: Mapping[str, Direction]
    space: Mapping[str, str]
    trials: Sequence[Trial]
    name: str = ""

    @classmethod
    def read(cls, tree: Mapping[str, Any]) -> Trials:
        """The trials from plain containers, as `plain` gives them."""
        return cls(**{**tree, "trials": [Trial(**each) for each in tree["trials"]]})

    def plain(self) -> dict[str, Any]:
        """The same as plain containers."""
        return {**vars(self), "trials": [vars(each) for each in self.trials]}


def ranked(trials: Sequence[T], objectives: Mapping[str, Direction]) -> list[T]:
    """The trials with all scores: the best one by the first objective first, of equal ones the earlier."""
    if not objectives:
        return []
    scored = [each for each in trials if all(map(is_score, _scores(each, objectives)))]
    return sorted(scored, key=lambda each: (-_points(each, objectives)[0], each.number))


def ties(trials: Sequence[T], objectives: Mapping[str, Direction]) -> list[list[T]]:
    """Ranked trials in groups with the same first score, for each that several of them have."""
    groups = groupby(ranked(trials, objectives), key=lambda each: _points(each, objectives)[0])
    return [group for _, own in groups if len(group := list(own)) > 1]


def front(trials: Sequence[T], objectives: Mapping[str, Direction]) -> list[T]:
    """The Pareto front: trials that no other one dominates in the objectives, in their order."""
    points = {each.number: _points(each, objectives) for each in ranked(trials, objectives)}
    return [
        each
        for each in trials
        if (own := points.get(each.number)) is not None
        and not any(other != own and _dominates(other, own) for other in points.values())
    ]


def is_score(value: object) -> bool:
    """Whether an objective has a value that trials can be compared by."""
    return isinstance(value, int | float) and math.isfinite(value)


def _scores(trial: Trial, objectives: Mapping[str, Direction]) -> list[float | None]:
    return [trial.scores.get(name) for name in objectives]


def _points(trial: Trial, objectives: Mapping[str, Direction]) -> list[float]:
    """The scores, with signs with which larger ones are better; all of them are known."""
    return [
        float(trial.scores[name] or 0.0) * (1 if direction == "max" else -1)
        for name, direction in objectives.items()
    ]


def _dominates(other: Sequence[float], own: Sequence[float]) -> bool:
    return all(a >= b for a, b in zip(other, own, strict=True))


class Searched(Study):
    """A study whose cells are the trials of a search, by their values and seeds."""

    _searched: Trials

    @property
    def searched(self) -> Trials:
        """The trials, and what is searched."""
        return self._searched

    @classmethod
    def opened(cls, folder: Path) -> Searched:
        """The search in a folder, with the cells that have begun; raises as `Study.opened`."""
        study = super().opened(folder)
        assert isinstance(study, Searched)  # it makes an object of its own class
        tree = Manifest.read(folder).search
        with reading(folder / STUDY):
            study._searched = Trials.read(tree or {})
        return study

    def _record(self) -> dict[str, Any] | None:
        return self.searched.plain()

    @property
    def trials(self) -> pd.DataFrame:
        """A row for each trial, in the order in which they were proposed: its values, scores and state."""
        import pandas as pd

        found = self.searched
        rows = [
            {**each.values, **{name: each.scores.get(name) for name in found.objectives}, "state": each.state}
            for each in found.trials
        ]
        frame = pd.DataFrame(rows, columns=[*found.space, *found.objectives, "state"])
        return frame.astype(dict.fromkeys(found.objectives, float))

    @property
    def best_params(self) -> Mapping[str, Any]:
        """The values of the best trial by key, of several objectives by the first one; objects by name."""
        return dict(self._best.values)

    @property
    def best_run(self) -> Run:
        """The run of the best trial with the first seed."""
        return self.runs_of(self._best)[0]

    def runs_of(self, trial: Trial) -> list[Run]:
        """The finished runs of a trial, one for each seed."""
        row = row_at(trial.values, self.names)
        return [run for key, run in self.finished.items() if row_of(key, self.names) == row]

    @property
    def _best(self) -> Trial:
        self._check_begun()
        if not (found := ranked(self.searched.trials, self.searched.objectives)):
            raise ConfigError("sweep: no trial has a score")
        return found[0]
