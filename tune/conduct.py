"""Runs a sweep: checks everything, shares what is common, hands trials to Ray Tune, writes what came out."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ray
import ray.tune
import yaml
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback, TBXLoggerCallback
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler

from rayfed.config import Config, to_dict
from rayfed.errors import ConfigError, RayFedError
from rayfed.executors.cluster import connection, node_resources
from rayfed.report.console import say
from rayfed.report.files import write_text
from rayfed.setup import Setup, prepare
from tune.experiment import Base
from tune.progress import Progress
from tune.resources import Demand, at_once, bundles, describe, factory
from tune.results import Outcomes, read, write
from tune.searcher import RoundAwareOptuna, check_parts, make_sampler, unlock
from tune.shared import put_frozen
from tune.space import Space, Values
from tune.sweep import Sweep, make_sweep
from tune.trial import Common, Trial

MANIFEST, BASE, TUNE = "sweep.yaml", "base.yaml", "tune"
MOST_COMBINATIONS = 64

ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # `loggers` says which
    "RAY_AIR_NEW_OUTPUT": "0",  # Ray's tables; `Progress` shows lines of our own
    "TUNE_GLOBAL_CHECKPOINT_S": "2",  # what a crash loses of Ray's own view; rounds are never lost
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}


@dataclass(frozen=True, kw_only=True)
class Search:
    """A checked sweep, ready to run.

    Attributes:
        sweep: What was asked.
        base: The experiment that is varied.
        path: Folder of the sweep.
        config: The experiment with the paper's values.
        points: These values, then other points to try first.
    """

    sweep: Sweep
    base: Base
    path: Path
    config: Config
    points: tuple[Values, ...]

    @property
    def space(self) -> Space:
        return self.sweep.read_space()

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(self.config.seed + i for i in range(self.sweep.seeds))


def search(
    config: Sequence[str] | Config, space: Mapping[str, Any], quiet: bool = True, **options: Any
) -> ray.tune.ResultGrid:
    """Search the hyperparameters of an experiment.

    Args:
        config: Overrides as on the command line of rayfed.run, or a checked config.
        space: Ranges by config key, as in configs/sweep: `{"server.q": {"loguniform": [0.1, 10]}}`.
        quiet: Show nothing.
        options: Keys of `tune.sweep.Sweep`: objective, trials, seeds, searcher, scheduler, output, ...

    Returns:
        Ray Tune's table of trials. The folder of the sweep holds best.yaml, trials.parquet and figures.

    Raises:
        ConfigError: Something in the input is wrong; found before any trial starts.
    """
    sweep = make_sweep({**options, "space": dict(space)})
    path = new_folder(sweep)
    if not isinstance(config, Config):
        return run(check(sweep, tuple(config), None, path), quiet)[0]
    saved = {BASE: yaml.safe_dump(to_dict(config), sort_keys=False)}
    path.mkdir(parents=True, exist_ok=True)
    write_text(path / BASE, saved[BASE])
    return run(check(sweep, (), str(path / BASE), path), quiet)[0]


def resume(path: str | Path, quiet: bool = True) -> ray.tune.ResultGrid:
    """Go on with a sweep that was interrupted or killed; a finished one is only reported again.

    Raises:
        ConfigError: The folder holds no sweep.
    """
    found, here = continued(Path(path))
    with contextlib.chdir(here):
        return run(found, quiet, again=True)[0]


def check(sweep: Sweep, overrides: tuple[str, ...], file: str | None, path: Path) -> Search:
    """Check a sweep against the schema of its experiment.

    Raises:
        ConfigError: One line: the key, its value, what is allowed.
    """
    if "val_accuracy" in sweep.objectives:
        overrides = ("evaluation.validation=true", *overrides)
    base, space = Base(overrides, file), sweep.read_space()
    plain = base.config({})
    _check_objectives(sweep, plain)
    _check_loggers(sweep)
    space.check(base.config)
    paper = {**_values_of(plain, space), **sweep.default}
    named = {"default": sweep.default, **{f"points.{i}": point for i, point in enumerate(sweep.points)}}
    points = []
    for where, point in named.items():
        points.append(space.select({**paper, **point}))
        space.point({**points[-1], **point}, where)
    config = base.config(points[0])
    check_parts(config)
    return Search(sweep=sweep, base=base, path=path, config=config, points=tuple(points))


def _check_objectives(sweep: Sweep, config: Config) -> None:
    if config.protocol != "single":
        raise ConfigError(f"protocol: {config.protocol!r} is several runs; a sweep needs protocol=single")
    if not config.evaluation.every:
        raise ConfigError("evaluation.every: 0 scores nothing, so there is no objective; set it to 1")
    if "val_accuracy" in sweep.objectives and not config.evaluation.validation:
        raise ConfigError("objective: val_accuracy needs evaluation.validation=true")
    if "held_out_accuracy" in sweep.objectives and not config.data.held_out:
        raise ConfigError("objective: held_out_accuracy needs data.held_out=DOMAIN")


def _check_loggers(sweep: Sweep) -> None:
    if "mlflow" in sweep.loggers and importlib.util.find_spec("mlflow") is None:
        raise ConfigError("loggers: mlflow is not installed; install rayfed-sim[mlflow] or leave it out")


def _values_of(config: Config, space: Space) -> dict[str, Any]:
    """What the experiment has for each key of the space."""
    found, tree = {}, to_dict(config)
    for parameter in space.parameters:
        value: Any = tree
        for part in parameter.key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        found[parameter.key] = value.get("name") if isinstance(value, dict) else value
    return found


def new_folder(sweep: Sweep) -> Path:
    """The folder of a new sweep, absolute.

    Raises:
        ConfigError: It holds a sweep already.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = Path(sweep.output or f"runs/sweep-{sweep.name}-{stamp}-{os.getpid()}").absolute()
    if (path / MANIFEST).exists():
        raise ConfigError(
            f"output: {str(path)!r} already holds a sweep; choose another folder, or continue it with "
            f"resume={path}"
        )
    return path


def continued(path: Path) -> tuple[Search, Path]:
    """A sweep as it was started, and the folder it was started in.

    Raises:
        ConfigError: The folder holds no sweep.
    """
    path = path.absolute()
    try:
        tree = yaml.safe_load((path / MANIFEST).read_text())
        sweep, overrides, file = make_sweep(tree["sweep"]), tuple(tree["overrides"]), tree["file"]
        here = Path(tree["here"])
    except (OSError, yaml.YAMLError, TypeError, KeyError) as err:
        raise ConfigError(f"resume: {str(path)!r} holds no sweep to continue: {err}") from err
    here = here if here.is_dir() else Path.cwd()
    with contextlib.chdir(here):
        return check(sweep, overrides, file, path), here


def run(found: Search, quiet: bool = False, again: bool = False) -> tuple[ray.tune.ResultGrid, Outcomes]:
    """Run a checked sweep and write its results.

    Raises:
        ConfigError: The data, the model or the cluster refuse it.
        KeyboardInterrupt: It was asked to end.
    """
    tell: Callable[[str], None] = (lambda _: None) if quiet else say
    setups = [prepare(replace(found.config, seed=seed)) for seed in found.seeds]
    with _connected(found.config) as url:
        most, size = _room(found, setups[0], tell)
        if url:
            tell(f"Ray dashboard: http://{url}")
        if not again:
            _describe(found)
        unlock(found.path)
        common = Common(
            base=found.base,
            folder=found.path,
            here=Path.cwd(),
            objectives=tuple(found.sweep.objectives),
            seeds=found.seeds,
            frozen=put_frozen([setup.world for setup in setups]),
        )
        trainable = ray.tune.with_resources(ray.tune.with_parameters(Trial, common=common), size)
        grid = _fit(_tuner(found, trainable, most, quiet))
        outcomes = read(found.path, found.sweep, found.base, found.seeds)
    write(outcomes)
    missing = found.sweep.trials - len(outcomes.trials)
    if missing or any(trial.state == "unfinished" for trial in outcomes.trials):
        raise KeyboardInterrupt
    return grid, outcomes


@contextlib.contextmanager
def _connected(config: Config) -> Iterator[str]:
    cluster = config.cluster
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    for name in ("ray.tune", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with connection(
            cluster.address, cluster.num_cpus, cluster.num_gpus, cluster.dashboard, cluster.connect_timeout
        ) as url:
            yield url
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _room(found: Search, setup: Setup, tell: Callable[[str], None]) -> tuple[int, Any]:
    """How many trials may run at a time, and what each reserves.

    Raises:
        ResourceError: Some trial of the space can never be placed.
    """
    sweep, nodes = found.sweep, tuple(node_resources())
    wanted = min(sweep.trials, sweep.max_concurrent or sweep.trials)
    demand = Demand(
        clients=len(setup.experiment.clients),
        per_round=setup.experiment.clients_per_round,
        together=wanted,
        nodes=nodes,
    )
    searched = [p for p in found.space.parameters if p.key.split(".")[0] == "cluster"]
    for values in _corners(found, [p.key for p in searched]):
        bundles(found.base.config(values).cluster, demand)
    own = bundles(found.config.cluster, demand)
    most = max(1, at_once(own, nodes, wanted))
    tell(describe(own, most))
    if not searched:
        return most, factory(found.config.cluster, demand)
    return wanted, lambda config: factory(found.base.config(config["values"]).cluster, demand)


def _corners(found: Search, keys: Sequence[str]) -> Iterator[Values]:
    """Combinations of all options and ends of ranges of some keys, beside the paper's values."""
    corners: list[dict[str, Any]] = [dict(found.points[0])]
    for parameter in found.space.parameters:
        if parameter.key in keys:
            corners = [{**c, parameter.key: value} for c in corners for value in parameter.probes()]
    if len(corners) > MOST_COMBINATIONS:
        raise ConfigError(
            f"space.{keys[0]}: {len(corners)} combinations of cluster keys are too many to check"
        )
    yield from corners


def _describe(found: Search) -> None:
    """Write what will be searched; it is all that `resume` needs."""
    found.path.mkdir(parents=True, exist_ok=True)
    tree = {
        "sweep": yaml.safe_load(yaml.safe_dump(_plain(asdict(found.sweep)))),
        "overrides": list(found.base.overrides),
        "file": found.base.file,
        "here": str(Path.cwd()),
    }
    write_text(found.path / MANIFEST, yaml.safe_dump(tree, sort_keys=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _tuner(found: Search, trainable: Any, most: int, quiet: bool) -> ray.tune.Tuner:
    """A tuner for a new sweep, or for what a killed one left."""
    folder = found.path / TUNE
    if list(folder.glob("experiment_state*.json")) and ray.tune.Tuner.can_restore(str(folder)):
        return ray.tune.Tuner.restore(str(folder), trainable)
    sweep, config = found.sweep, found.config
    seed = config.seed if sweep.seed is None else sweep.seed
    searcher = RoundAwareOptuna(
        found.space,
        found.base,
        sweep.objectives,
        found.path,
        [found.space.point(point, "points") for point in found.points],
        make_sampler(sweep.search, seed),
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
            name=TUNE,
            storage_path=str(found.path),
            verbose=0,
            callbacks=[*_loggers(found), Progress(tuple(sweep.objectives), config.rounds, quiet)],
            failure_config=ray.tune.FailureConfig(max_failures=1),
            checkpoint_config=ray.tune.CheckpointConfig(
                checkpoint_frequency=config.checkpoint.every, num_to_keep=2, checkpoint_at_end=False
            ),
        ),
    )


def _fit(tuner: ray.tune.Tuner) -> ray.tune.ResultGrid:
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
    if asked.grace > rounds:
        raise ConfigError(f"scheduler.grace: {asked.grace} is more than the {rounds} rounds of a trial")
    if asked.name == "median":
        return MedianStoppingRule(
            time_attr="round", grace_period=asked.grace, min_samples_required=asked.least
        )
    return ASHAScheduler(
        time_attr="round", max_t=rounds, grace_period=asked.grace, reduction_factor=asked.reduction
    )


def _loggers(found: Search) -> list[Any]:
    loggers = [JsonLoggerCallback(), CSVLoggerCallback()]
    if "tensorboard" in found.sweep.loggers:
        loggers.append(TBXLoggerCallback())
    if "mlflow" in found.sweep.loggers:
        from ray.air.integrations.mlflow import MLflowLoggerCallback

        uri = os.environ.get("MLFLOW_TRACKING_URI") or (found.path / "mlruns").as_uri()
        loggers.append(MLflowLoggerCallback(tracking_uri=uri, experiment_name=found.sweep.name))
    return loggers


def _trial_name(trial: Any) -> str:
    return f"{trial.config['number']:04d}-{trial.trial_id}"
