"""Ray Tune's tuner for the study of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray.tune
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback, TBXLoggerCallback
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler

from rayfed.errors import RayFedError
from rayfed.record.trackers.mlflow import DATABASE, PREFIXES, URI
from rayfed.record.trackers.tracker import temporary_environment, variables
from tune.checks import Search
from tune.progress import Progress
from tune.searcher import OptunaSearcher, scored_rows
from tune.study import SweepStudy
from tune.sweep import Sweep

RAY_FOLDER = "tune"
"""Folder of Ray Tune's files inside the folder of the sweep."""


def make_tuner(study: SweepStudy, trainable: Any, most: int, progress: Progress) -> ray.tune.Tuner:
    """A tuner that runs the trials of a sweep that have not ended.

    Args:
        study: The study of the sweep.
        trainable: `tune.trial.Trial` with its parameters and resources.
        most: Largest number of trials at the same time.
        progress: Is told how trials end.
    """
    search = study.search
    return ray.tune.Tuner(
        trainable,
        tune_config=ray.tune.TuneConfig(
            search_alg=OptunaSearcher(study),
            scheduler=_scheduler(study),
            num_samples=search.sweep.trials,
            max_concurrent_trials=most,
            reuse_actors=True,
            trial_name_creator=_trial_name,
            trial_dirname_creator=_trial_name,
        ),
        run_config=ray.tune.RunConfig(
            name=RAY_FOLDER,
            storage_path=str(search.path),
            verbose=0,
            callbacks=[*_loggers(search), progress],
            failure_config=ray.tune.FailureConfig(max_failures=1),
        ),
    )


def run_trials(tuner: ray.tune.Tuner) -> None:
    """Run all trials.

    Raises:
        RayFedError: The searcher or a check of RayFed stopped the sweep.
    """
    try:
        tuner.fit()
    except ray.tune.TuneError as err:
        cause: BaseException | None = err
        while cause is not None and not isinstance(cause, RayFedError):
            cause = cause.__cause__ or cause.__context__
        raise (cause or err) from None


def pauses_of(sweep: Sweep, rounds: int, every: int) -> tuple[int, ...]:
    """The rounds before the last one after which the scheduler may end a trial.

    Args:
        sweep: The sweep.
        rounds: Number of rounds of a trial.
        every: Every so many rounds have scores.
    """
    asked = sweep.schedule
    wanted: Sequence[int] = ()
    if asked.name == "asha":
        wanted = [asked.grace * asked.reduction**rung for rung in range(rounds.bit_length())]
    elif asked.name == "median":
        wanted = range(asked.grace, rounds)
    scored = {-(-number // every) * every for number in wanted}
    return tuple(sorted(number for number in scored if number < rounds))


def _scheduler(study: SweepStudy) -> TrialScheduler:
    """The rule that stops trials early; it knows the rows of the trials that earlier commands ended."""
    asked = study.search.sweep.schedule
    if asked.name == "none":
        return FIFOScheduler()
    [(name, mode)] = study.search.sweep.objectives.items()
    scheduler: TrialScheduler
    if asked.name == "median":
        scheduler = MedianStoppingRule(
            *("round", name, mode), grace_period=asked.grace, min_samples_required=asked.least
        )
    else:
        rounds = study.search.config.rounds
        scheduler = ASHAScheduler(
            *("round", name, mode), max_t=rounds, grace_period=asked.grace, reduction_factor=asked.reduction
        )
    for trial in study.searched.trials:
        if trial.state in ("finished", "stopped early"):
            earlier: Any = _Earlier(trial_id=f"earlier-{trial.number}")
            scheduler.on_trial_add(earlier, earlier)
            for row in scored_rows(study, dict(trial.values)):
                scheduler.on_trial_result(earlier, earlier, row)
    return scheduler


@dataclass(frozen=True)
class _Earlier:
    """A trial of an earlier command, and the controller without other trials, for Ray's schedulers."""

    trial_id: str

    def get_live_trials(self) -> list[Any]:
        return []


def _loggers(search: Search) -> list[Any]:
    loggers = [JsonLoggerCallback(), CSVLoggerCallback()]
    if "tensorboard" in search.sweep.loggers:
        loggers.append(TBXLoggerCallback())
    if "mlflow" in search.sweep.loggers:
        from ray.air.integrations.mlflow import MLflowLoggerCallback

        mine = variables(PREFIXES)
        uri = mine.get(URI) or f"sqlite:///{search.path / DATABASE}"
        with temporary_environment(mine, PREFIXES):  # MLflow is imported here and reads these variables
            loggers.append(MLflowLoggerCallback(tracking_uri=uri, experiment_name=search.sweep.name))
    return loggers


def _trial_name(trial: Any) -> str:
    return f"{trial.config['number']:04d}-{trial.trial_id}"
