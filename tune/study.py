"""The study of a sweep: it grows by the trials that Optuna proposes, each with a cell for each seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from rayfed.experiment.kept_session import QUIETLY
from rayfed.experiment.study.cells import Study
from rayfed.experiment.study.coordinates import SEED, Key, row_at
from rayfed.experiment.study.described import Described, Fixed
from rayfed.experiment.study.run_cell import CommonParts
from rayfed.experiment.study.study_folder import Manifest, is_finished
from rayfed.experiment.study.trials import Searched, State, Trial, Trials
from rayfed.record.recorded_run import RecordedRun
from tune.checks import Search
from tune.space import Space

STATES: Mapping[TrialState, State] = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "stopped early",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "unfinished",
}

REFUSED = "refused"
"""Attribute of a proposal whose parts are incompatible, which is no trial."""


def names_of(search: Search) -> tuple[str, ...]:
    """Names of the coordinates: the searched keys, and the seed."""
    return (*(parameter.key for parameter in search.space.parameters), SEED)


class SweepStudy(Searched):
    """The study of a sweep, whose folder this process holds.

    Attributes:
        search: The checked sweep.
        proposals: The study of Optuna, which knows the proposals and how they ended.
    """

    def __init__(self, search: Search, manifest: Manifest, proposals: optuna.Study) -> None:
        """Begin with the cells of the trials that are known, or with those of the first one.

        Raises:
            ConfigError: The folder holds a run of another description.
        """
        self.search, self.proposals, self._manifest = search, proposals, manifest
        before = Trials.read(manifest.search).trials if manifest.search else ()
        self._errors = {each.number: each.error for each in before if each.error}
        first = self._cells_of(search.points[0])
        super().__init__(first, names=names_of(search), score=next(iter(search.sweep.objectives)))
        self.path = self._folder = search.path
        for trial in self.searched.trials:
            if trial.state != "unfinished":  # the others are proposed again
                self.add(trial.values)

    def _keys_of(self, values: Mapping[str, Any]) -> list[Key]:
        row = row_at(values, names_of(self.search))
        return [(*row, seed) for seed in self.search.seeds]

    def _cells_of(self, values: Mapping[str, Any]) -> dict[Key, Described]:
        cell = self.search.base.cell
        keys = zip(self._keys_of(values), self.search.seeds, strict=True)
        return {key: Fixed.of(cell(values, seed), dict.fromkeys(QUIETLY)) for key, seed in keys}

    def add(self, values: Mapping[str, Any]) -> list[str]:
        """Add the cells with these values to the manifest; returns their folders, relative to the study.

        Raises:
            ConfigError: A folder holds a run of another description.
        """
        added = Study(self._cells_of(values), names=self.names)
        configs = added._configs(self.search.path, CommonParts())
        self.cells |= added.cells
        self._enter(self._manifest, configs)
        return [self._manifest.entries[key].folder for key in added.cells]

    def folders(self, values: Mapping[str, Any]) -> list[Path]:
        """The folders of the cells with these values."""
        return [self._manifest.place(key) for key in self._keys_of(values)]

    def has_ended(self, values: Mapping[str, Any]) -> bool:
        """Whether all cells with these values are finished, or were stopped by the scheduler."""
        entries = [self._manifest.entries[key] for key in self._keys_of(values)]
        return all(entry.sha256 or entry.stopped for entry in entries)

    def note(self, values: Mapping[str, Any] | None = None) -> None:
        """Write the manifest. Args: values: those of cells that have ended; None: none have."""
        for key in () if values is None else self._keys_of(values):
            entry, place = self._manifest.entries[key], self._manifest.place(key)
            digest = is_finished(entry, entry.rounds, place)
            stopped = 0 if digest else len(RecordedRun(place).rounds)
            self._manifest.entries[key] = replace(entry, sha256=digest, stopped=stopped)
        self._note(self._manifest)
        self._manifest.write()

    def fail(self, number: int, reason: str) -> None:
        """Note why a trial failed."""
        self._errors[number] = reason
        self.note()

    def find_finished(self) -> None:
        """Fill `finished`, after the last trial."""
        self._find_finished(self._manifest)

    @property
    def searched(self) -> Trials:
        """The trials so far, and what is searched."""
        sweep, space = self.search.sweep, self.search.space
        return Trials(
            name=sweep.name,
            objectives=sweep.objectives,
            space={parameter.key: str(parameter) for parameter in space.parameters},
            trials=[self._trial(each, space) for each in known_trials(self.proposals)],
        )

    def _trial(self, trial: FrozenTrial, space: Space) -> Trial:
        names = self.search.sweep.objectives
        is_scored = trial.state is TrialState.COMPLETE
        return Trial(
            number=trial.number,
            values=decode(trial, space),
            state=STATES[trial.state],
            scores=dict(zip(names, trial.values, strict=True)) if is_scored else {},
            error=self._errors.get(trial.number, "") if trial.state is TrialState.FAIL else "",
        )


def known_trials(proposals: optuna.Study) -> list[FrozenTrial]:
    """The trials that were proposed and not refused, in their order."""
    every = proposals.get_trials(deepcopy=False)
    return [each for each in every if each.state is not TrialState.WAITING and REFUSED not in each.user_attrs]


def decode(trial: FrozenTrial, space: Space) -> dict[str, Any]:
    """The values of a trial; labels that Optuna stores are turned into the options they stand for."""
    from optuna.trial import FixedTrial

    complete = all(p.key in trial.params for p in space.parameters if not p.when)
    return space.suggest(FixedTrial(trial.params)) if complete else dict(trial.params)
