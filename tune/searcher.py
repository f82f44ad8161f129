"""Optuna as searcher of Ray Tune: proposals are checked, become cells of the study, and are kept on disk."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState
from ray.tune.search import Searcher

from rayfed.config.schema import compatible_parts
from rayfed.errors import ConfigError
from rayfed.types import Row
from tune.checks import Search
from tune.mean_rows import mean_rows
from tune.study import REFUSED, SweepStudy, known_trials
from tune.sweep import SearcherConfig
from tune.trial import FOLDERS, NUMBER, VALUES

STUDY = "sweep"
JOURNAL = "optuna.journal"
LOCK = re.compile(r"optuna\.journal\.lock([0-9a-f-]{36}\..*)?")
MOST_REFUSED = 200
"""Largest number of invalid proposals in a row."""

ROUND = "round"


class OptunaSearcher(Searcher):
    """Proposes the trials of a sweep, and tells Optuna how they ended.

    A trial that the scheduler stopped early is reported to Optuna as pruned, with its intermediate values,
    instead of complete with a partial score. A proposal whose parts are incompatible is reported as failed
    and replaced by the next one. Trials that an earlier command began and did not end are proposed first. A
    trial with the values of an earlier one has its cells, so that it starts no process.
    """

    def __init__(self, study: SweepStudy) -> None:
        """Begin to propose.

        Args:
            study: The study of the sweep.
        """
        super().__init__()
        self._study = study
        self._sweep = study.search.sweep
        self._rounds = study.search.config.rounds
        self._names = tuple(self._sweep.objectives)
        known = known_trials(study.proposals)
        lost = [trial for trial in known if trial.state is TrialState.RUNNING]
        self._count = len(known)
        self._lost = [optuna.Trial(study.proposals, trial._trial_id) for trial in lost]
        self._reported = {trial.number: max(trial.intermediate_values, default=0) for trial in lost}
        self._running: dict[str, tuple[optuna.Trial, dict[str, Any]]] = {}

    def suggest(self, trial_id: str) -> Any:
        """The next trial; None: it has the values of one that runs; `FINISHED`: there are no more."""
        with quiet_optuna():
            while (proposed := self._next()) is not None:
                trial, values = proposed
                if any(values == running for _, running in self._running.values()):
                    self._lost.insert(0, trial)  # it is proposed again when the other one has ended
                    return None
                folders = self._study.add(values)
                if not self._study.has_ended(values):
                    self._running[trial_id] = proposed
                    return {NUMBER: trial.number, VALUES: values, FOLDERS: folders}
                self._tell_known(trial, values)
        return Searcher.FINISHED

    def _next(self) -> tuple[optuna.Trial, dict[str, Any]] | None:
        """A trial that was not ended, or a new proposal, with its values; None: there are as many as wanted.

        Raises:
            ConfigError: Too many proposals in a row are invalid.
        """
        space, base = self._study.search.space, self._study.search.base
        if self._lost:
            trial = self._lost.pop(0)
            return trial, space.suggest(trial)
        if self._count >= self._sweep.trials:
            return None
        for _ in range(MOST_REFUSED):
            trial = self._study.proposals.ask()
            values = space.suggest(trial)
            try:
                compatible_parts(base.config(values))
            except ConfigError as err:
                trial.set_user_attr(REFUSED, str(err))
                self._study.proposals.tell(trial, state=TrialState.FAIL)
                reason = err
            else:
                self._count += 1
                return trial, values
        raise ConfigError(f"space: {MOST_REFUSED} proposals in a row are invalid; the last one: {reason}")

    def _tell_known(self, trial: optuna.Trial, values: dict[str, Any]) -> None:
        """Tell Optuna of a trial whose cells have ended before."""
        rows = scored_rows(self._study, values)
        for row in rows:
            self._report(trial, row)
        self._tell(trial, rows[-1] if rows else None)
        self._study.note()

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Report an intermediate value to Optuna; a round that is repeated after a crash is reported once."""
        with quiet_optuna():
            self._report(self._running[trial_id][0], result)

    def _report(self, trial: optuna.Trial, row: Row) -> None:
        if len(self._names) == 1 and row[ROUND] > self._reported.get(trial.number, 0):
            self._reported[trial.number] = row[ROUND]
            trial.report(row[self._names[0]], row[ROUND])

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Tell Optuna the values of the last round, or that the trial was pruned or failed."""
        trial, values = self._running.pop(trial_id)
        with quiet_optuna():
            if error:
                self._study.proposals.tell(trial, state=TrialState.FAIL)
            else:
                self._tell(trial, result)
        self._study.note(None if error else values)

    def _tell(self, trial: optuna.Trial, row: Row | None) -> None:
        if row is None or row[ROUND] < self._rounds:
            self._study.proposals.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.proposals.tell(trial, [row[name] for name in self._names])

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: Optuna's journal and the manifest of the study have all."""

    def restore(self, checkpoint_path: str) -> None:
        """Restore nothing."""

    def __getstate__(self) -> dict[str, Any]:
        """Nothing, as Ray's copy of the searcher is never used."""
        return {}


def scored_rows(study: SweepStudy, values: dict[str, Any]) -> list[Row]:
    """The rows of a trial, means over its seeds, of the rounds that have all objectives."""
    names = tuple(study.search.sweep.objectives)
    rows = mean_rows(study.folders(values), names)
    return [row for row in rows if all(row.get(name) is not None for name in names)]


def open_proposals(search: Search) -> optuna.Study:
    """Optuna's study in the folder of a sweep; a new one begins with the sweep's points."""
    known = (search.path / JOURNAL).exists()
    seed = search.config.seed if search.sweep.seed is None else search.sweep.seed
    modes = search.sweep.objectives.values()
    with quiet_optuna():
        study = optuna.create_study(
            storage=open_storage(search.path),
            study_name=STUDY,
            directions=["maximize" if mode == "max" else "minimize" for mode in modes],
            load_if_exists=True,
        )
        # A sampler with the seed of an earlier command would repeat its draws.
        study.sampler = make_sampler(search.sweep.search, seed + len(study.get_trials(deepcopy=False)))
        if not known:
            for point in search.points:
                study.enqueue_trial(search.space.point(point, "points"))
    return study


def make_sampler(search: SearcherConfig, seed: int) -> optuna.samplers.BaseSampler:
    """Optuna's sampler, with all options set that affect proposals and whose defaults may change."""
    with quiet_optuna():
        if search.name == "nsga2":
            return optuna.samplers.NSGAIISampler(population_size=search.population, seed=seed)
        if search.name == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        return optuna.samplers.TPESampler(
            n_startup_trials=search.startup, multivariate=True, group=True, constant_liar=True, seed=seed
        )


def open_storage(folder: Path) -> optuna.storages.BaseStorage:
    """Storage of Optuna's study, a journal file; only one process at a time may write to it."""
    from optuna.storages.journal import JournalFileBackend

    with quiet_optuna():
        return optuna.storages.JournalStorage(JournalFileBackend(str(folder / JOURNAL)))


def unlock(folder: Path) -> None:
    """Remove the lock that a killed process may have left: a link to the journal, named by Optuna."""
    for lock in folder.glob(f"{JOURNAL}.lock*"):
        if LOCK.fullmatch(lock.name) and lock.is_symlink() and lock.readlink().name == JOURNAL:
            lock.unlink(missing_ok=True)


def load_study(folder: Path) -> optuna.Study:
    """Optuna's study of a sweep, for reading."""
    with quiet_optuna():
        return optuna.load_study(study_name=STUDY, storage=open_storage(folder))


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Suppress Optuna's messages about new studies and its warnings about experimental features."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
