"""Optuna as searcher of Ray Tune: proposals are checked, and the study is kept on disk."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState
from ray.tune.search.optuna import OptunaSearch

from rayfed.config.schema import Config, compatible_parts
from rayfed.errors import ConfigError
from tune.experiment import Base
from tune.space import Space, Values
from tune.sweep import SearcherConfig

STUDY = "sweep"
JOURNAL = "optuna.journal"
LOCK = re.compile(r"optuna\.journal\.lock([0-9a-f-]{36}\..*)?")
MOST_REFUSED = 200
"""Largest number of invalid proposals in a row."""

VALUES = "values"
NUMBER = "number"
ROUND = "round"
REFUSED = "refused"


class RoundAwareOptuna(OptunaSearch):
    """Ray's OptunaSearch with rounds, conditional parameters, invalid proposals and restarts.

    A trial that the scheduler stopped early is reported to Optuna as pruned, with its intermediate values,
    instead of complete with a partial score. A proposal whose parts are incompatible is reported as failed
    and replaced by the next one. After a crash, proposals that are missing in Ray's snapshot are proposed
    again.
    """

    def __init__(
        self,
        space: Space,
        base: Base,
        objectives: Mapping[str, str],
        folder: Path,
        points: Sequence[Values],
        sampler: optuna.samplers.BaseSampler,
    ) -> None:
        """Open the study in the folder, or create one.

        Args:
            space: Parameters and their ranges.
            base: Experiment that the values are applied to.
            objectives: Direction, max or min, by column.
            folder: Folder of the sweep, which holds the study.
            points: Points to try first, in this order.
            sampler: Optuna's sampler, which makes the proposals.
        """
        names = list(objectives)
        modes = list(objectives.values())
        one = len(names) == 1
        known = (folder / JOURNAL).exists()
        self._parameters = space
        self._base = base
        self._rounds = base.config({}).rounds
        self._last: dict[str, int] = {}
        self._ot_study: Any
        with quiet_optuna():
            super().__init__(
                space=_nothing,
                metric=names[0] if one else names,
                mode=modes[0] if one else modes,
                sampler=sampler,
                study_name=STUDY,
                storage=open_storage(folder),
            )
            if not known:
                for point in points:
                    self._ot_study.enqueue_trial(dict(point))

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """The values of the next trial and its number."""
        with quiet_optuna():
            for _ in range(MOST_REFUSED):
                trial = self._lost_trial() or self._ot_study.ask()
                values = self._parameters.suggest(trial)
                try:
                    check_parts(self._base.config(values))
                except ConfigError as err:
                    trial.set_user_attr(REFUSED, str(err))
                    self._ot_study.tell(trial, state=TrialState.FAIL)
                    reason = err
                else:
                    self._ot_trials[trial_id] = trial
                    return {NUMBER: trial.number, VALUES: values}
        raise ConfigError(f"space: {MOST_REFUSED} proposals in a row are invalid; the last one: {reason}")

    def _lost_trial(self) -> Any:
        """A trial in the study that Ray's snapshot lacks, because it was proposed just before a crash."""
        known = {trial.number for trial in self._ot_trials.values()}
        for trial in self._ot_study.get_trials(deepcopy=False):
            if trial.number in known or trial.state is TrialState.WAITING or REFUSED in trial.user_attrs:
                continue
            if trial.state is TrialState.RUNNING:
                return optuna.Trial(self._ot_study, trial._trial_id)
            return optuna.trial.FixedTrial(trial.params, trial.number)
        return None

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Report an intermediate value to Optuna; a round that is repeated after a crash is reported once."""
        if isinstance(self.metric, list) or result[ROUND] <= self._last.get(trial_id, 0):
            return
        self._last[trial_id] = result[ROUND]
        trial = self._ot_trials[trial_id]
        if not is_told(trial):
            with quiet_optuna():
                trial.report(result[self.metric], result[ROUND])

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Report to Optuna the value of the last round, or that the trial was pruned or failed."""
        if is_told(self._ot_trials[trial_id]):
            self._completed_trials.add(trial_id)
            return
        early = not result or result[ROUND] < self._rounds
        with quiet_optuna():
            super().on_trial_complete(trial_id, None if early or error else result, error)


def is_told(trial: Any) -> bool:
    """Whether the study has recorded the end of a trial already, before a crash."""
    if isinstance(trial, optuna.trial.FixedTrial):
        return True
    state: TrialState = trial.storage.get_trial(trial._trial_id).state
    return state.is_finished()


def check_parts(config: Config) -> None:
    """Check that server, local half and tuning are compatible.

    Raises:
        ConfigError: They are not.
    """
    compatible_parts(config)


def _nothing(trial: optuna.Trial) -> dict[str, Any]:
    """Define-by-run function that Ray requires; it is not used, because `suggest` asks the space."""
    return {}


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
    """Storage of the study, a journal file; only one process at a time may write to it."""
    from optuna.storages.journal import JournalFileBackend

    with quiet_optuna():
        return optuna.storages.JournalStorage(JournalFileBackend(str(folder / JOURNAL)))


def unlock(folder: Path) -> None:
    """Remove the lock that a killed process may have left: a link to the journal, named by Optuna."""
    for lock in folder.glob(f"{JOURNAL}.lock*"):
        if LOCK.fullmatch(lock.name) and lock.is_symlink() and lock.readlink().name == JOURNAL:
            lock.unlink(missing_ok=True)


def load_study(folder: Path) -> optuna.Study:
    """The study of a sweep, for reading."""
    with quiet_optuna():
        return optuna.load_study(study_name=STUDY, storage=open_storage(folder))


def count_of_trials(folder: Path) -> int:
    """Number of trials that a sweep has proposed so far."""
    return len(load_study(folder).get_trials(deepcopy=False)) if (folder / JOURNAL).exists() else 0


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
