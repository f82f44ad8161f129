"""Successive halving: trials run for a part of their rounds, and only the better half of them goes on.

Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization, AISTATS 2016
[jamieson2016halving], section 3. A trial that goes on continues after its last round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from rayfed.columns import VALIDATED, is_larger_better, metric_of
from rayfed.errors import ConfigError, PartsFailedError
from rayfed.experiment.study.cells import Study
from rayfed.experiment.study.coordinates import SEED, Key
from rayfed.experiment.study.described import Fixed, Varied
from rayfed.experiment.study.equal_cells import METHOD
from rayfed.experiment.study.scores import VALIDATION
from rayfed.record.recorded_run import reported_round
from rayfed.report.tuned_values import RATE

if TYPE_CHECKING:
    from rayfed.config.schema import Config, Request
    from rayfed.experiment.finished_run import RoundRow, Run
    from rayfed.experiment.study.study_folder import Manifest

KNOB = "knob"
"""Name of the coordinate with the value of a method's main hyperparameter; None: that of its experiment."""

SHARES = (0.25, 0.5, 1.0)
"""Shares of the rounds after which the better half of the trials goes on."""


@dataclass(frozen=True)
class TrialPoint:
    """A trial of a method: the rate of the clients, and the value of its main hyperparameter, if changed."""

    rate: float
    knob: float | None = None


@dataclass(frozen=True, kw_only=True)
class Base:
    """The experiment of a method that trials change.

    Attributes:
        experiment: The experiment, whose models are scored on validation examples.
        knob: Key of its main hyperparameter; empty: none is tuned.
    """

    experiment: Varied
    knob: str = ""

    @cached_property
    def config(self) -> Request:
        """Its config."""
        return self.experiment.config()

    def values(self, point: TrialPoint) -> dict[str, float]:
        """The changes of a trial, by key."""
        return {RATE: point.rate} | ({self.knob: point.knob} if point.knob is not None else {})

    def cells(self, point: TrialPoint, seeds: Sequence[int]) -> list[Fixed]:
        """The experiments of a trial, one for each seed.

        Raises:
            ConfigError: A value is not allowed.
        """
        config = self.experiment.changed(**self.values(point)).config()
        return [Fixed(replace(config, seed=seed), self.experiment.given) for seed in seeds]

    def rounds(self, share: float) -> int:
        """Number of the scored round at which a share of the rounds is done."""
        every = max(1, self.config.evaluation.every)
        wanted = math.ceil(share * self.config.rounds / every - 1e-9) * every
        return min(self.config.rounds, wanted)


def is_over(until: Mapping[str, int], at: Mapping[str, Any], rows: Sequence[RoundRow]) -> bool:
    """The rule that ends a trial. Args: until: rounds by method. at, rows: as of `Study.run`."""
    return len(rows) >= until[at[METHOD]]


class Rung(Study):
    """Trials that run until a round; those that an earlier rung stopped go on."""

    def __init__(
        self,
        bases: Mapping[str, Base],
        trials: Mapping[str, Sequence[TrialPoint]],
        seeds: Sequence[int],
        share: float,
    ) -> None:
        """Describe the trials.

        Args:
            bases: The experiments by method.
            trials: The trials of each method.
            seeds: The seeds of each trial.
            share: Share of their rounds that are run.
        """
        self.until = {name: base.rounds(share) for name, base in bases.items()}
        cells = {
            (name, point.rate, point.knob, seed): cell
            for name, points in trials.items()
            for point in points
            for seed, cell in zip(seeds, bases[name].cells(point, seeds), strict=True)
        }
        super().__init__(cells, names=(METHOD, RATE, KNOB, SEED))

    def _enter(self, manifest: Manifest, configs: Mapping[Key, Config]) -> dict[Key, Config]:
        placed = super()._enter(manifest, configs)
        for key in placed:
            entry, method = manifest.entries[key], str(key[self.names.index(METHOD)])
            if 0 < entry.stopped < self.until[method]:
                manifest.entries[key] = replace(entry, stopped=0)
        manifest.write()
        return placed

    def run_until(self, folder: Path, at_once: int | Literal["auto"], quiet: bool | None) -> None:
        """Run what is missing. Trials that fail have no score. Args: as of `Study.run`.

        Raises:
            PartsFailedError: No trial of a method is left.
        """
        try:
            self.run(folder, at_once, partial(is_over, self.until), quiet)
        except PartsFailedError:
            place = self.names.index(METHOD)
            if {key[place] for key in self.cells} > {key[place] for key in self.finished}:
                raise

    def validated(self, method: str) -> dict[TrialPoint, float]:
        """The mean score of each trial of a method over its seeds and parts; without those that failed.

        Returns:
            The scores, with the sign by which larger ones are better.

        Raises:
            ConfigError: A trial was not scored on validation examples.
        """
        found: dict[TrialPoint, list[float]] = {}
        failed: set[TrialPoint] = set()
        by_validation = self._reported == VALIDATION
        for key in self.cells:
            at: dict[str, Any] = dict(zip(self.names, key, strict=True))
            point = TrialPoint(at[RATE], at[KNOB])
            if at[METHOD] != method:
                continue
            if key not in self.finished:
                failed.add(point)
                continue
            column, value = validation_score(self.finished[key], self.until[method], by_validation)
            found.setdefault(point, []).append(value * sign_of(column))
        means = {point: fmean(values) for point, values in found.items() if point not in failed}
        return {point: mean for point, mean in means.items() if math.isfinite(mean)}


def sign_of(column: str) -> int:
    """The factor by which larger scores of a column of validation are better."""
    return 1 if is_larger_better(column.removeprefix(VALIDATED)) else -1


def validation_score(run: Run, until: int, by_validation: bool) -> tuple[str, float]:
    """The validation score that a run had after a number of rounds: its column, and its value.

    Args:
        run: The run, which may have more rounds.
        until: That number.
        by_validation: Validation selects the round that is reported, so the best score until then counts.

    Raises:
        ConfigError: It was not scored on validation examples.
    """
    recorded = run.recorded
    rows = [row for row in recorded.rounds if row["round"] <= until]
    best = by_validation or recorded.best_by is not None
    row = reported_round(rows, "validation" if best else "last", recorded.ties)
    metric = metric_of(row, VALIDATED)
    if metric is None:
        raise ConfigError(
            f"tuned: {run.path} has no validation score in round {until}, and trials are compared on "
            f"validation examples; set data.val, such as data.val=0.1, and evaluation.every to 1 or more"
        )
    value = row[VALIDATED + metric]
    return VALIDATED + metric, float("nan") if value is None else float(value)


def better_half(scores: Mapping[TrialPoint, float]) -> list[TrialPoint]:
    """The trials that go on, the best one first; of equal ones the earlier.

    >>> better_half({TrialPoint(0.1): 0.5, TrialPoint(0.2): 0.9, TrialPoint(0.3): 0.5})
    [TrialPoint(rate=0.2, knob=None), TrialPoint(rate=0.1, knob=None)]
    """
    ranked = sorted(scores, key=lambda point: -scores[point])
    return ranked[: math.ceil(len(ranked) / 2)]


@dataclass(kw_only=True)
class Halving:
    """Contests of trials, in one study of all of them.

    Attributes:
        bases: The experiments by method.
        seeds: The seeds of each trial.
        folder: Folder of the study, in which the same contests go on.
        at_once: As of `Study.run`.
        quiet: As of `Study.run`.
        column: The column of validation by which the trials were compared; empty before the first contest.
    """

    bases: Mapping[str, Base]
    seeds: Sequence[int]
    folder: Path
    at_once: int | Literal["auto"] = 1
    quiet: bool | None = None
    column: str = ""

    def contest(self, trials: Mapping[str, Sequence[TrialPoint]]) -> dict[str, dict[TrialPoint, float]]:
        """Run trials for a quarter of their rounds, the better half for a half, and half of these for all.

        Args:
            trials: The trials of each method.

        Returns:
            By method the scores of the trials that ran all rounds, with the sign by which larger ones are
            better.

        Raises:
            ConfigError: A trial was not scored on validation examples, or a value is not allowed.
            PartsFailedError: All trials of a method failed.
        """
        left = {name: list(points) for name, points in trials.items()}
        scores: dict[str, dict[TrialPoint, float]] = {}
        for share in SHARES:
            rung = Rung(self.bases, left, self.seeds, share)
            rung.run_until(self.folder, self.at_once, self.quiet)
            scores = {name: rung.validated(name) for name in left}
            for name, found in scores.items():
                if not found:
                    raise PartsFailedError(f"tuned: no trial of {name} has a finite validation score")
            left = {name: better_half(found) for name, found in scores.items()}
            first = next(iter(rung.finished.values()))
            self.column, _ = validation_score(first, first.recorded.rounds[-1]["round"], False)
        return scores
