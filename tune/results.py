"""Results of a sweep: its trials with their last rows, which are read from the cells of its study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rayfed.experiment.study.trials import Direction, Trial, front, ranked, ties
from rayfed.record.folder import digest_if_finished
from rayfed.types import Row
from tune.experiment import Base
from tune.mean_rows import mean_rows
from tune.study import SweepStudy
from tune.sweep import Sweep

DEFAULT = 0
"""Number of the trial with the paper's values, which is proposed first."""


@dataclass(frozen=True, kw_only=True)
class Outcome(Trial):
    """A trial with what its cells recorded.

    Attributes:
        row: Columns of its last round, means over seeds; empty where no round was run.
        sha256: SHA-256 digest of the final tensors of the first seed; empty unless finished.
        folders: Folders of its cells, one per seed.
    """

    row: Row
    sha256: str = ""
    folders: Sequence[Path] = ()

    @property
    def rounds(self) -> int:
        return int(self.row.get("round", 0))


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """All trials of a sweep, in the order of their proposals.

    Attributes:
        path: Folder of the sweep.
        sweep: Space, objectives, searcher, scheduler and budget.
        base: The experiment that was varied.
        seeds: Experiment seeds of every trial.
        trials: Results of the trials.
    """

    path: Path
    sweep: Sweep
    base: Base
    seeds: tuple[int, ...]
    trials: tuple[Outcome, ...]

    @property
    def objectives(self) -> Mapping[str, Direction]:
        return self.sweep.objectives

    @cached_property
    def ranked(self) -> list[Outcome]:
        """Finished trials, the best one by the first objective first, and of equal ones the earlier first."""
        return ranked(self.trials, self.objectives)

    @property
    def finished(self) -> list[Outcome]:
        """Trials that ran all rounds and have every objective, in their order."""
        return sorted(self.ranked, key=lambda trial: trial.number)

    @property
    def best(self) -> Outcome | None:
        """The first of the ranked trials; None where no trial is finished."""
        return next(iter(self.ranked), None)

    @property
    def ties(self) -> list[list[Outcome]]:
        """Ranked trials in groups of the same score, for every score that several trials have."""
        return ties(self.trials, self.objectives)

    @property
    def default(self) -> Outcome | None:
        """The trial with the paper's values."""
        return next((t for t in self.trials if t.number == DEFAULT), None)

    @property
    def front(self) -> list[Outcome]:
        """Pareto front: finished trials that no other trial dominates in the objectives."""
        return front(self.trials, self.objectives)


def read_outcomes(study: SweepStudy) -> Outcomes:
    """The results of a sweep, finished or not."""
    search = study.search
    return Outcomes(
        path=search.path,
        sweep=search.sweep,
        base=search.base,
        seeds=search.seeds,
        trials=tuple(_outcome(study, trial) for trial in study.searched.trials),
    )


def _outcome(study: SweepStudy, trial: Trial) -> Outcome:
    names, folders = tuple(study.search.sweep.objectives), study.folders(trial.values)
    scored = list(mean_rows(folders, names))
    full = [row for row in scored if all(name in row for name in names)]
    is_finished = trial.state == "finished"
    digest = digest_if_finished(folders[0], study.search.config.rounds) if is_finished else ""
    return Outcome(**vars(trial), row=(full or scored or [{}])[-1], sha256=digest, folders=folders)
