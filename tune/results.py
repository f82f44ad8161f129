"""Results of a sweep, read from its folder: from the study and the run folders of its trials."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from rayfed.record.folder import digest_if_finished
from rayfed.record.recorded_run import RecordedRun
from rayfed.types import Row
from tune.experiment import Base
from tune.folder import ERROR, trial_folder
from tune.searcher import REFUSED, load_study
from tune.space import Space
from tune.sweep import Sweep
from tune.trial import mean_of

STATES = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "stopped early",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "unfinished",
}
DEFAULT = 0
"""Number of the trial with the paper's values, which is proposed first."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one trial.

    Attributes:
        number: Index in the order of proposals.
        state: finished, stopped early, failed or unfinished.
        values: Hyperparameters by config key.
        row: Columns of its last round, means over seeds; empty where no round was run.
        sha256: SHA-256 digest of the final tensors of the first seed; empty unless finished.
        error: First line of the error with which it failed, else empty.
    """

    number: int
    state: str
    values: Mapping[str, Any]
    row: Row
    sha256: str
    error: str

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
    def finished(self) -> list[Outcome]:
        """Trials that ran all rounds and have every objective."""
        names = self.sweep.objectives
        return [
            t
            for t in self.trials
            if t.state == "finished" and all(is_score(t.row.get(name)) for name in names)
        ]

    @property
    def ranked(self) -> list[Outcome]:
        """Finished trials, the best one by the first objective first, and of equal ones the earlier first."""
        name, direction = next(iter(self.sweep.objectives.items()))
        sign = 1 if direction == "max" else -1
        return sorted(self.finished, key=lambda t: (-sign * t.row[name], t.number))

    @property
    def best(self) -> Outcome | None:
        """The first of the ranked trials; None where no trial is finished."""
        return next(iter(self.ranked), None)

    @property
    def ties(self) -> list[list[Outcome]]:
        """Ranked trials in groups of the same score, for every score that several trials have."""
        name = next(iter(self.sweep.objectives))
        groups = (list(group) for _, group in groupby(self.ranked, key=lambda t: t.row[name]))
        return [group for group in groups if len(group) > 1]

    @property
    def default(self) -> Outcome | None:
        """The trial with the paper's values."""
        return next((t for t in self.trials if t.number == DEFAULT), None)

    @property
    def front(self) -> list[Outcome]:
        """Pareto front: finished trials that no other trial dominates in the objectives."""
        signs = {n: 1 if d == "max" else -1 for n, d in self.sweep.objectives.items()}
        points = [(t, [s * t.row[n] for n, s in signs.items()]) for t in self.finished]
        return [
            t for t, own in points if not any(_dominates(other, own) for _, other in points if other != own)
        ]


def is_score(value: object) -> bool:
    """Whether an objective has a value that trials can be compared by."""
    return isinstance(value, int | float) and math.isfinite(value)


def _dominates(other: Sequence[float], own: Sequence[float]) -> bool:
    return all(a >= b for a, b in zip(other, own, strict=True))


def read_outcomes(path: Path, sweep: Sweep, base: Base, seeds: tuple[int, ...]) -> Outcomes:
    """Read the results of a sweep, finished or not, from its folder."""
    space = sweep.read_space()
    rounds = base.config({}).rounds
    study = load_study(path).get_trials(deepcopy=False)
    known = [t for t in study if t.state is not TrialState.WAITING and REFUSED not in t.user_attrs]
    trials = tuple(_outcome(path, t, space, seeds, (rounds, tuple(sweep.objectives))) for t in known)
    return Outcomes(path=path, sweep=sweep, base=base, seeds=seeds, trials=trials)


def _outcome(
    path: Path, trial: FrozenTrial, space: Space, seeds: tuple[int, ...], whole: tuple[int, tuple[str, ...]]
) -> Outcome:
    folder = trial_folder(path, trial.number)
    state = STATES[trial.state]
    rows = [RecordedRun(f).rounds for f in seed_folders(folder, seeds)]
    done = min(map(len, rows))
    scored = [mean_of([r[i] for r in rows], whole[1]) for i in range(done)]
    full = [row for row in scored if all(name in row for name in whole[1])]
    error = folder / ERROR
    return Outcome(
        number=trial.number,
        state=state,
        values=decode(trial, space),
        row=(full or scored or [{}])[-1],
        sha256=digest_if_finished(seed_folders(folder, seeds)[0], whole[0]) if state == "finished" else "",
        error=error.read_text().strip().splitlines()[0] if state == "failed" and error.exists() else "",
    )


def seed_folders(folder: Path, seeds: Sequence[int]) -> list[Path]:
    """The run folders of a trial, one per seed."""
    return [folder / f"seed-{seed}" for seed in seeds]


def decode(trial: FrozenTrial, space: Space) -> dict[str, Any]:
    """The values of a trial; labels that Optuna stores are turned into the options they stand for."""
    from optuna.trial import FixedTrial

    complete = all(p.key in trial.params for p in space.parameters if not p.when)
    return space.suggest(FixedTrial(trial.params)) if complete else dict(trial.params)
