"""Checks a sweep against the schema of its experiment, and writes and reads sweep.yaml for `resume`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from rayfed.config.schema import Config, compatible_parts, to_dict
from rayfed.errors import ConfigError, shown
from rayfed.evaluation.stopping import StopConfig
from rayfed.experiment.study.study_folder import KIND
from rayfed.record.atomic_files import write_text
from rayfed.record.claim import check_own_folder, look
from rayfed.record.readers import SWEEP, read_yaml, reading
from rayfed.record.trackers.tracker import check_trackers
from rayfed.user_files import user_path
from tune.experiment import Base
from tune.space import Space, Values
from tune.sweep import Sweep, make_sweep


@dataclass(frozen=True, kw_only=True)
class Search:
    """A checked sweep, ready to run.

    Attributes:
        sweep: Space, objectives, searcher, scheduler and budget.
        base: The experiment that is varied.
        path: Folder of the sweep.
        config: The experiment with the paper's values.
        points: Points to try first: the paper's values, then others.
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


def check_sweep(sweep: Sweep, overrides: tuple[str, ...], file: str | None, path: Path) -> Search:
    """Check a sweep against the schema of its experiment.

    Raises:
        ConfigError: A value is wrong; the message has the key, its value and what is allowed.
    """
    if _validates(sweep):
        overrides = ("evaluation.validation=true", *overrides)
    base = Base(overrides, file)
    space = sweep.read_space()
    plain = base.config({})
    _check_one_method(base)
    _check_stop(plain)
    _check_objectives(sweep, base, plain)
    _check_loggers(sweep, plain)
    space.check(base.config)
    paper = {**_values_of(plain, space), **sweep.default}
    named = {"default": sweep.default, **{f"points.{i}": point for i, point in enumerate(sweep.points)}}
    points = []
    for where, point in named.items():
        points.append(space.select({**paper, **point}))
        space.point({**points[-1], **point}, where)
    config = base.config(points[0])
    compatible_parts(config)
    return Search(sweep=sweep, base=base, path=path, config=config, points=tuple(points))


def _check_one_method(base: Base) -> None:
    """Check that the user asks for no second method; a model's own comparison is left out without a word."""
    asked = any(each.partition("=")[0].lstrip("+") == "compare" for each in base.overrides)
    if asked and (others := base.tree.get("compare")):
        raise ConfigError(
            f"compare: {shown(others)} is several runs; a sweep runs one method, so leave it out, and "
            f"compare the best trial afterwards with rayfed.run --config <sweep>/best.yaml"
        )


def _check_stop(config: Config) -> None:
    """Check that all trials have the same rounds, which schedulers and Optuna's pruning compare.

    Raises:
        ConfigError: A rule of the runs would end some of them earlier.
    """
    if config.stop != StopConfig():
        raise ConfigError(
            "stop: a sweep compares its trials round by round; leave stop out, use scheduler=asha, and stop "
            "the run of the best trial: rayfed.run --config <sweep>/best.yaml stop.patience=3"
        )


VALIDATED = ("val_", "global_val_")
"""Beginnings of the names of columns of validation."""


def _validates(sweep: Sweep) -> bool:
    return any(name.startswith(VALIDATED) for name in sweep.objectives)


def _check_objectives(sweep: Sweep, base: Base, config: Config) -> None:
    if (protocol := base.tree.get("protocol", "single")) != "single":
        raise ConfigError(f"protocol: {protocol!r} is several runs; a sweep needs protocol=single")
    if not config.evaluation.every:
        raise ConfigError("evaluation.every: 0 scores nothing, so there is no objective; set it to 1")
    if _validates(sweep) and not config.evaluation.validation:
        name = next(name for name in sweep.objectives if name.startswith(VALIDATED))
        raise ConfigError(f"objective: {name} needs evaluation.validation=true")
    if sweep.schedule.name != "none" and sweep.schedule.grace > config.rounds:
        raise ConfigError(
            f"scheduler.grace: {sweep.schedule.grace} is more than the {config.rounds} rounds of a trial"
        )
    if "held_out_accuracy" in sweep.objectives and not config.data.held_out:
        raise ConfigError("objective: held_out_accuracy needs data.held_out=DOMAIN")


def _check_loggers(sweep: Sweep, config: Config) -> None:
    if config.trackers:
        raise ConfigError(
            f"trackers: {', '.join(config.trackers)} is for single runs; a sweep has loggers=[mlflow]"
        )
    check_trackers([name for name in sweep.loggers if name == "mlflow"], "loggers")


def _values_of(config: Config, space: Space) -> dict[str, Any]:
    """Values of the experiment for the keys of the space; keys that it does not have are left out."""
    values = {}
    tree = to_dict(config)
    for parameter in space.parameters:
        *path, last = parameter.key.split(".")
        section: Any = tree
        for part in path:
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict) and last in section:
            value = section[last]
            values[parameter.key] = value.get("name") if isinstance(value, dict) else value
    return values


def new_folder(sweep: Sweep) -> Path:
    """The folder of a new sweep, absolute.

    Raises:
        ConfigError: The folder holds a sweep already, or anything else.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = user_path(sweep.output or f"runs/sweep-{sweep.name}-{stamp}-{os.getpid()}", "output").absolute()
    check_own_folder(path)
    look(path, kind=KIND)
    return path


def open_sweep(path: Path, trials: Any = None) -> tuple[Search, Path]:
    """The sweep in a folder, and the working folder that it was started in.

    Args:
        trials: Number of trials that it shall have; None: as many as before.

    Raises:
        ConfigError: The folder holds no sweep, or one that cannot have so many trials.
    """
    path = path.absolute()
    with reading(path, f"resume: {str(path)!r} holds no sweep to continue"):
        tree = read_yaml(path / SWEEP)
        sweep = make_sweep(tree["sweep"])
        overrides = tuple(tree["overrides"])
        file = tree["file"]
        here = Path(tree["here"])
    here = here if here.is_dir() else Path.cwd()
    if trials is not None:
        sweep = _with_more(make_sweep({**tree["sweep"], "trials": trials}), sweep.trials)
    with contextlib.chdir(here):
        return check_sweep(sweep, overrides, file, path), here


def _with_more(sweep: Sweep, before: int) -> Sweep:
    if sweep.trials < before:
        raise ConfigError(f"trials: {sweep.trials} are fewer than the {before} of this sweep; give more")
    return sweep


def describe(search: Search) -> None:
    """Write what was asked for into sweep.yaml, from which `resume` continues."""
    tree = {
        "sweep": yaml.safe_load(yaml.safe_dump(_plain(asdict(search.sweep)), sort_keys=False)),
        "overrides": list(search.base.overrides),
        "file": search.base.file,
        "here": str(Path.cwd()),
    }
    write_text(search.path / SWEEP, yaml.safe_dump(tree, sort_keys=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value
