"""Ray Tune's tuner for a checked sweep, new or restored after a crash."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ray.tune
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback, TBXLoggerCallback
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler

from rayfed.errors import RayFedError
from rayfed.record.readers import DamagedError, read_json
from rayfed.record.trackers import DATABASE, URI, temporary_environment, variables
from tune.checks import Search
from tune.progress import Progress
from tune.searcher import RoundAwareOptuna, count_of_trials, make_sampler
from tune.sweep import Sweep

RAY_FOLDER = "tune"
"""Folder of Ray Tune's files inside the folder of the sweep."""

SNAPSHOT = re.compile(r"experiment_state-\d{4}-\d{2}-\d{2}_\d{2}-\d{2}-\d{2}\.json")


def make_tuner(search: Search, trainable: Any, most: int) -> ray.tune.Tuner:
    """A tuner for a new sweep, or one restored from the snapshot of a killed sweep.

    Args:
        search: The checked sweep.
        trainable: `tune.trial.Trial` with its parameters and resources.
        most: Largest number of trials at the same time.
    """
    folder = search.path / RAY_FOLDER
    _drop_unreadable(folder)
    if list(folder.glob("experiment_state*.json")) and ray.tune.Tuner.can_restore(str(folder)):
        return ray.tune.Tuner.restore(str(folder), trainable)
    sweep = search.sweep
    config = search.config
    seed = config.seed if sweep.seed is None else sweep.seed
    searcher = RoundAwareOptuna(
        search.space,
        search.base,
        sweep.objectives,
        search.path,
        [search.space.point(point, "points") for point in search.points],
        make_sampler(sweep.search, seed + count_of_trials(search.path)),  # a new one would repeat its draws
    )
    one = len(sweep.objectives) == 1
    name, mode = next(iter(sweep.objectives.items()))
    return ray.tune.Tuner(
        trainable,
        tune_config=ray.tune.TuneConfig(
            metric=name if one else None,
            mode=mode if one else None,
            search_alg=searcher,
            scheduler=_scheduler(sweep, config.rounds),
            num_samples=sweep.trials,
            max_concurrent_trials=most,
            reuse_actors=True,
            trial_name_creator=_trial_name,
            trial_dirname_creator=_trial_name,
        ),
        run_config=ray.tune.RunConfig(
            name=RAY_FOLDER,
            storage_path=str(search.path),
            verbose=0,
            callbacks=[*_loggers(search), Progress(tuple(sweep.objectives), config.rounds)],
            failure_config=ray.tune.FailureConfig(max_failures=1),
            checkpoint_config=ray.tune.CheckpointConfig(
                checkpoint_frequency=config.checkpoint.every, num_to_keep=2, checkpoint_at_end=False
            ),
        ),
    )


def _drop_unreadable(folder: Path) -> None:
    """Remove snapshots that are incomplete because Ray was killed while it wrote them.

    Ray then uses an older snapshot; without one, Optuna's journal and the run folders hold all results.
    """
    for file in folder.glob("experiment_state*.json"):
        if not SNAPSHOT.fullmatch(file.name):
            continue
        try:
            read_json(file, dict)
        except DamagedError:
            file.unlink(missing_ok=True)


def forget_snapshots(path: Path) -> None:
    """Remove Ray's state of a sweep; Optuna's journal and the run folders hold all results."""
    for file in (path / RAY_FOLDER).glob("experiment_state*.json"):
        if SNAPSHOT.fullmatch(file.name):
            file.unlink(missing_ok=True)


def run_trials(tuner: ray.tune.Tuner) -> ray.tune.ResultGrid:
    """Run all trials.

    Raises:
        RayFedError: The searcher or a check of RayFed stopped the sweep.
    """
    try:
        return tuner.fit()
    except ray.tune.TuneError as err:
        cause: BaseException | None = err
        while cause is not None and not isinstance(cause, RayFedError):
            cause = cause.__cause__ or cause.__context__
        raise (cause or err) from None


def _scheduler(sweep: Sweep, rounds: int) -> TrialScheduler:
    asked = sweep.schedule
    if asked.name == "none":
        return FIFOScheduler()
    if asked.name == "median":
        return MedianStoppingRule(
            time_attr="round", grace_period=asked.grace, min_samples_required=asked.least
        )
    return ASHAScheduler(
        time_attr="round", max_t=rounds, grace_period=asked.grace, reduction_factor=asked.reduction
    )


def _loggers(search: Search) -> list[Any]:
    loggers = [JsonLoggerCallback(), CSVLoggerCallback()]
    if "tensorboard" in search.sweep.loggers:
        loggers.append(TBXLoggerCallback())
    if "mlflow" in search.sweep.loggers:
        from ray.air.integrations.mlflow import MLflowLoggerCallback

        mine = variables()
        uri = mine.get(URI) or f"sqlite:///{search.path / DATABASE}"
        with temporary_environment(mine):  # MLflow is imported here and reads these variables
            loggers.append(MLflowLoggerCallback(tracking_uri=uri, experiment_name=search.sweep.name))
    return loggers


def _trial_name(trial: Any) -> str:
    return f"{trial.config['number']:04d}-{trial.trial_id}"
