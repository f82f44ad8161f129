"""The description of a sweep: space, objectives, searcher, scheduler and budget, from YAML and overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from annotated_types import Ge

from rayfed.columns import better_values
from rayfed.config.check_keys import parse
from rayfed.config.compose import folder
from rayfed.errors import ConfigError, unknown
from rayfed.types import Count
from rayfed.user_files import parse_value, read_file, user_path
from tune.experiment import check_searchable
from tune.space import Space, read_space, with_numbers

Direction = Literal["max", "min"]
SearcherName = Literal["tpe", "nsga2", "random"]
SchedulerName = Literal["none", "asha", "median"]


@dataclass(frozen=True, kw_only=True)
class SearcherConfig:
    """The algorithm that proposes trials.

    Attributes:
        name: tpe: Optuna's tree-structured Parzen estimator; nsga2: evolutionary search for several
            objectives; random: random search.
        startup: For tpe: number of random proposals before the first one that is based on results.
        population: For nsga2: number of trials in a generation.
    """

    name: SearcherName = "tpe"
    startup: Count = 5
    population: Annotated[int, Ge(2)] = 10


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The rule that stops trials early.

    Attributes:
        name: none: no trial is stopped; asha: asynchronous successive halving; median: trials below the
            median of the others are stopped.
        grace: Number of rounds before a trial may be stopped.
        reduction: For asha: one in `reduction` trials continues at each rung; rungs are at grace times powers
            of `reduction`.
        least: For median: smallest number of other trials to compare with.
    """

    name: SchedulerName = "none"
    grace: Count = 1
    reduction: Annotated[int, Ge(2)] = 3
    least: Count = 3


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One sweep.

    Attributes:
        name: Name of the sweep in folders and tables.
        experiment: Overrides of the experiment that is varied; those of the command line are applied after
            them.
        space: Ranges and conditions by config key (`tune.space`).
        default: The paper's values of these keys, tried first; for other keys the experiment's values are
            used.
        points: Further points to try first; keys left out have the paper's values.
        objective: One or several columns of the results of rounds, each with max or min; the value in the
            last round counts.
        searcher: Algorithm that proposes trials, by name or with options.
        scheduler: Rule that stops trials early, by name or with options.
        trials: Number of trials.
        seeds: Number of experiment seeds per trial; the objective is the mean over them.
        seed: Seed of the searcher; none: the seed of the experiment.
        max_concurrent: Largest number of trials at the same time; none: as many as fit.
        loggers: Outputs of Ray Tune besides result.json and progress.csv of every trial.
        output: Folder of the sweep; none: a new one under runs/.
    """

    name: str = "sweep"
    experiment: tuple[str, ...] = ()
    space: dict[str, Any] = field(default_factory=dict)
    default: dict[str, Any] = field(default_factory=dict)
    points: tuple[dict[str, Any], ...] = ()
    objective: str | tuple[str, ...] | dict[str, Direction] = "val_accuracy"
    searcher: SearcherName | SearcherConfig = "tpe"
    scheduler: SchedulerName | SchedulerConfig = "none"
    trials: Count = 10
    seeds: Count = 1
    seed: Annotated[int, Ge(0)] | None = None
    max_concurrent: Count | None = None
    loggers: tuple[Literal["tensorboard", "mlflow"], ...] = ("tensorboard",)
    output: str | None = None

    @property
    def objectives(self) -> dict[str, Direction]:
        """Direction of every objective, in order; the first one chooses the best trial.

        Raises:
            ConfigError: The direction is not given and does not follow from the name.
        """
        given = self.objective
        if isinstance(given, dict):
            return given
        return {name: _direction(name) for name in ((given,) if isinstance(given, str) else given)}

    @property
    def search(self) -> SearcherConfig:
        """The searcher with all its options."""
        return SearcherConfig(name=self.searcher) if isinstance(self.searcher, str) else self.searcher

    @property
    def schedule(self) -> SchedulerConfig:
        """The scheduler with all its options."""
        return SchedulerConfig(name=self.scheduler) if isinstance(self.scheduler, str) else self.scheduler

    def read_space(self) -> Space:
        """The checked search space.

        Raises:
            ConfigError: A key cannot be searched, or a range is wrong.
        """
        for key in self.space:
            check_searchable(key)
        return read_space(self.space)


SHORT = tuple(f.name for f in fields(Sweep) if f.name not in ("name", "experiment", "seed"))
"""Keys of a sweep that may be written without `sweep.`; `seed` alone is the seed of the experiment."""


def make_sweep(tree: Mapping[str, Any]) -> Sweep:
    """A checked sweep from plain containers.

    Raises:
        ConfigError: A value is wrong; the message has the key, its value and what is allowed.
    """
    values = {key: with_numbers(tree[key]) for key in ("space", "default", "points") if key in tree}
    sweep = parse(Sweep, {**tree, **values}, "")
    sweep.read_space()
    if not sweep.objectives:
        raise ConfigError("objective: names no column; write objective=val_accuracy")
    if len(sweep.objectives) > 1 and sweep.schedule.name != "none":
        raise ConfigError(
            f"scheduler: {sweep.schedule.name!r} stops trials by one objective, there are "
            f"{len(sweep.objectives)}; set scheduler=none"
        )
    return sweep


def load_sweep(arguments: Sequence[str]) -> tuple[Sweep, tuple[str, ...]]:
    """A sweep and the overrides of its experiment, from a command line.

    Args:
        arguments: `sweep=NAME` (a file of configs/sweep, or a path), keys of the sweep, keys of the
            experiment.

    Raises:
        ConfigError: The sweep does not exist, or a value in it is wrong.
    """
    name = ""
    own: dict[str, Any] = {}
    rest: list[str] = []
    for text in arguments:
        key, sep, value = text.partition("=")
        if not sep or not key:
            raise ConfigError(f"{text!r} is not an override; write key=value")
        head = key.split(".")[0]
        if key == "sweep":
            name = value
        elif head == "sweep":
            own[key.removeprefix("sweep.")] = parse_value(key, value)
        elif head in SHORT:
            own[key] = parse_value(key, value)
        else:
            rest.append(text)
    if not name:
        raise ConfigError(
            f"sweep: missing; set sweep=NAME, one of: {', '.join(sweep_names())}, or the path of a YAML file"
        )
    tree = read_sweep(name)
    for key, value in own.items():
        _put(tree, key, value)
    sweep = make_sweep(tree)
    return sweep, (*sweep.experiment, *rest)


def sweep_names() -> list[str]:
    """Names of the sweeps in configs/sweep."""
    return sorted(path.stem for path in (folder() / "sweep").glob("*.yaml"))


def read_sweep(name: str) -> dict[str, Any]:
    """The mapping in `configs/sweep/<name>.yaml`, or in another file.

    Args:
        name: Name of a sweep, or path of a file that ends with .yaml or .yml.

    Raises:
        ConfigError: The file does not exist or is not a mapping in plain YAML.
    """
    own = name.endswith((".yaml", ".yml"))
    path = user_path(name, "sweep") if own else folder() / "sweep" / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"{unknown('sweep', name, sweep_names())}, or give the path of a YAML file")
    return {"name": path.stem, **read_file(path, "sweep")}


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set an override in the tree of a sweep.

    `space.server.q` is the parameter `server.q`, which the value null removes; other dots separate sections.
    """
    head, _, rest = key.partition(".")
    if not rest:
        tree[key] = value
        return
    section = tree.get(head) or {}
    if isinstance(section, str):  # the short form of a section: its name
        section = {"name": section}
    if not isinstance(section, dict):
        raise ConfigError(f"{key}: {head} is a value, not a section")
    section = {**section, rest: value}
    tree[head] = {k: v for k, v in section.items() if not (head == "space" and v is None)}


def _direction(name: str) -> Direction:
    if better := better_values(name):
        return "max" if better == "larger" else "min"
    raise ConfigError(
        f"objective: {name!r} is no column with a known direction, as val_accuracy is; for a column that the "
        f"method adds write 'objective={{{name}: max}}' or min"
    )
