"""Runs a sweep: holds the folder of its study, runs the trials with Ray Tune, writes the results."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
import ray.tune
import yaml

from rayfed.config.schema import Config, to_dict
from rayfed.engine.client_places import inline_device, is_measured, too_small
from rayfed.engine.setup import Setup
from rayfed.errors import ConfigError
from rayfed.executors.cluster import Resources, node_resources
from rayfed.executors.cluster_config import ClusterConfig
from rayfed.executors.connection import connection
from rayfed.executors.kinds.base import kind_of
from rayfed.experiment.plan import prepared
from rayfed.experiment.single_run import classes_in_words, last_words
from rayfed.experiment.study.study_folder import KIND, held
from rayfed.experiment.study.study_folder import new_folder as new_study
from rayfed.record.atomic_files import write_text
from rayfed.record.claim import look
from rayfed.terminal.console import say, stage
from tune.checks import Search, check_sweep, describe, new_folder, open_sweep
from tune.figures import draw_figures
from tune.progress import Progress
from tune.report import report, write
from tune.resources import Demand, at_once, bundles, factory, in_words
from tune.results import Outcomes, read_outcomes
from tune.searcher import open_proposals, unlock
from tune.space import Values
from tune.study import SweepStudy, names_of
from tune.sweep import make_sweep
from tune.trial import Common, Trial
from tune.tuner import make_tuner, pauses_of, run_trials

BASE = "base.yaml"
MOST_COMBINATIONS = 64

ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the loggers are those of `loggers`
    "RAY_AIR_NEW_OUTPUT": "0",  # no tables from Ray; `Progress` shows one line per trial
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",  # seconds between snapshots of Ray's state, which are not used
}


def search(
    config: Sequence[str] | Config, space: Mapping[str, Any], quiet: bool = True, **options: Any
) -> SweepStudy:
    """Search the hyperparameters of an experiment.

    Args:
        config: Overrides as on the command line of rayfed.run, or a checked config.
        space: Ranges by config key, as in configs/sweep: `{"server.q": {"loguniform": [0.1, 10]}}`.
        quiet: Print nothing.
        options: Keys of `tune.sweep.Sweep`: objective, trials, seeds, searcher, scheduler, output, ...

    Returns:
        The study of all trials, with `trials`, `best_params` and `best_run`. Its folder also holds report.md,
        best.yaml, trials.parquet and figures.

    Raises:
        ConfigError: The input is wrong; found before any trial starts.
    """
    sweep = make_sweep({**options, "space": dict(space)})
    path = new_folder(sweep)
    if not isinstance(config, Config):
        return run_sweep(check_sweep(sweep, tuple(config), None, path), quiet)[0]
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / BASE
        base.write_text(yaml.safe_dump(to_dict(config), sort_keys=False))
        return run_sweep(check_sweep(sweep, (), str(base), path), quiet)[0]


def resume(path: str | Path, quiet: bool = True, trials: int | None = None) -> SweepStudy:
    """Continue a sweep that was interrupted or killed, or add trials to it.

    Args:
        quiet: Print nothing.
        trials: Number of trials that it shall have; None: as many as before. Of a finished one only the
            results are then written again.

    Raises:
        ConfigError: The folder holds no sweep, or one that cannot have so many trials.
    """
    search, here = open_sweep(Path(path), trials)
    with contextlib.chdir(here):
        return run_sweep(search, quiet, continues=True)[0]


def run_sweep(search: Search, quiet: bool = False, continues: bool = False) -> tuple[SweepStudy, Outcomes]:
    """Run the trials of a checked sweep that have not ended, and write its results.

    Raises:
        ConfigError: The data, the model or the cluster does not support a trial of the space.
        KeyboardInterrupt: The sweep was asked to end; it can be resumed.
    """
    tell: Callable[[str], None] = (lambda _: None) if quiet else say
    with ExitStack() as held_open:
        manifest = held_open.enter_context(held(search.path, names_of(search))) if continues else None
        setup = prepared(search.config)
        url = held_open.enter_context(_connect(search.config))
        most, size = _room(search, setup, tell)
        if url:
            tell(f"Ray dashboard: http://{url}")
        if tested := classes_in_words(setup):
            tell(tested)
        if manifest is None:
            folder = new_study(search.path, look(search.path, kind=KIND), names_of(search))
            manifest = held_open.enter_context(folder)
            search = _at_home(search)
        describe(search)
        unlock(search.path)
        study = SweepStudy(search, manifest, open_proposals(search))
        common = Common(
            base=search.base,
            folder=search.path,
            here=Path.cwd(),
            objectives=tuple(search.sweep.objectives),
            seeds=search.seeds,
            pauses=pauses_of(search.sweep, search.config.rounds, search.config.evaluation.every),
        )
        trainable = ray.tune.with_resources(ray.tune.with_parameters(Trial, common=common), size)
        stage("running the trials")
        run_trials(make_tuner(study, trainable, most, Progress(study, tell)))
        study.find_finished()
        outcomes = read_outcomes(study)
        table = write(outcomes)
    missing = search.sweep.trials - len(outcomes.trials)
    if missing or any(trial.state == "unfinished" for trial in outcomes.trials):
        raise KeyboardInterrupt
    if table is not None:
        report(outcomes, table, draw_figures(outcomes))
        last_words(search.path, tell, search.config.report)
    return study, outcomes


def _at_home(search: Search) -> Search:
    """The same, with a copy of the file that it starts from in the folder of the sweep, for `resume`."""
    if not search.base.file or Path(search.base.file).name != BASE:
        return search
    write_text(search.path / BASE, Path(search.base.file).read_text())
    return check_sweep(search.sweep, search.base.overrides, str(search.path / BASE), search.path)


@contextlib.contextmanager
def _connect(config: Config) -> Iterator[str]:
    cluster = config.cluster
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    for name in ("ray.tune", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with connection(
            cluster.address, cluster.num_cpus, cluster.num_gpus, cluster.dashboard, cluster.connect_timeout
        ) as link:
            yield link.url
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _room(search: Search, setup: Setup, tell: Callable[[str], None]) -> tuple[int, Any]:
    """Number of trials that may run at the same time, and the resources that each reserves.

    Raises:
        ResourceError: The cluster can never hold some trial of the space.
    """
    sweep = search.sweep
    nodes = tuple(node_resources())
    wanted = min(sweep.trials, sweep.max_concurrent or sweep.trials)
    small = on_cpu(setup, search.config.cluster, nodes)
    if small:
        tell(small)
    demand = Demand(
        clients=len(setup.experiment.clients),
        per_round=setup.experiment.clients_per_round,
        together=wanted,
        nodes=nodes,
        on_cpu=bool(small),
    )
    searched = [p for p in search.space.parameters if p.key.split(".")[0] == "cluster"]
    for values in _corners(search, [p.key for p in searched]):
        bundles(search.base.config(values).cluster, demand)
    own = bundles(search.config.cluster, demand)
    most = max(1, at_once(own, nodes, wanted))
    tell(in_words(own, most))
    if not searched:
        return most, factory(search.config.cluster, demand)
    return wanted, lambda config: factory(search.base.config(config["values"]).cluster, demand)


def on_cpu(setup: Setup, cluster: ClusterConfig, nodes: Sequence[Resources]) -> str:
    """Why the trials leave the GPUs unused, judged by the paper's values; empty: they use them."""
    if not kind_of(cluster).needs_cluster:
        return inline_device(setup, cluster)[1]
    return too_small(setup, cluster) if is_measured(cluster, nodes) else ""


def _corners(search: Search, keys: Sequence[str]) -> Iterator[Values]:
    """All combinations of options and ends of ranges of these keys, with the paper's values of the others."""
    corners: list[dict[str, Any]] = [dict(search.points[0])]
    for parameter in search.space.parameters:
        if parameter.key in keys:
            corners = [{**c, parameter.key: value} for c in corners for value in parameter.probes()]
    if len(corners) > MOST_COMBINATIONS:
        raise ConfigError(
            f"space.{keys[0]}: {len(corners)} combinations of cluster keys are too many to check"
        )
    yield from corners
