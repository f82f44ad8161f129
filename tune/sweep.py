"""What a sweep is: space, objectives, searcher, scheduler and budget, from YAML and overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from annotated_types import Ge

from rayfed.config.check import parse
from rayfed.config.compose import folder, read_yaml
from rayfed.documents import DocumentError, parse_yaml, user_path
from rayfed.errors import ConfigError, shown, unknown
from rayfed.types import Count
from tune.experiment import check_searchable
from tune.space import Space, read_space

Direction = Literal["max", "min"]
SearcherName = Literal["tpe", "nsga2", "random"]
SchedulerName = Literal["none", "asha", "median"]
SMALLER_IS_BETTER = ("sigma", "loss", "bytes", "seconds", "time", "variance")


@dataclass(frozen=True, kw_only=True)
class SearcherConfig:
    """Who proposes the trials.

    Attributes:
        name: tpe: Optuna's tree-structured Parzen estimator; nsga2: evolution, for several objectives;
            random.
        startup: tpe: random proposals before the first one that is based on results.
        population: nsga2: trials of a generation.
    """

    name: SearcherName = "tpe"
    startup: Count = 5
    population: Annotated[int, Ge(2)] = 10


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Who stops trials early.

    Attributes:
        name: none: nobody; asha: asynchronous successive halving; median: below the median of the others.
        grace: Rounds that every trial gets.
        reduction: asha: one trial in so many goes on at each rung; rungs are at grace times its powers.
        least: median: other trials there must be to compare with.
    """

    name: SchedulerName = "none"
    grace: Count = 1
    reduction: Annotated[int, Ge(2)] = 3
    least: Count = 3


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One sweep.

    Attributes:
        name: For folders and tables.
        experiment: Overrides of the experiment that is varied; those of the command line come after them.
        space: What is searched, by config key.
        default: The paper's values of these keys, tried first; keys left out have the experiment's own.
        points: Further points to try first; keys left out have the paper's values.
        objective: A column of the rounds, or several, each with max or min; its value in the last round
            counts.
        searcher: Who proposes trials, by name or with options.
        scheduler: Who stops them early, by name or with options.
        trials: Trials to run.
        seeds: Experiment seeds per trial; the objective is their mean.
        seed: Of the proposals; none: the experiment's.
        max_concurrent: Most trials at the same time; none: as many as fit.
        loggers: Besides result.json and progress.csv of every trial.
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
            ConfigError: It does not follow from the name.
        """
        given = self.objective
        if isinstance(given, dict):
            return given
        return {name: _direction(name) for name in ((given,) if isinstance(given, str) else given)}

    @property
    def search(self) -> SearcherConfig:
        return SearcherConfig(name=self.searcher) if isinstance(self.searcher, str) else self.searcher

    @property
    def schedule(self) -> SchedulerConfig:
        return SchedulerConfig(name=self.scheduler) if isinstance(self.scheduler, str) else self.scheduler

    def read_space(self) -> Space:
        for key in self.space:
            check_searchable(key)
        return read_space(self.space)


SHORT = tuple(f.name for f in fields(Sweep) if f.name not in ("name", "experiment", "seed"))
"""Keys of a sweep that need no `sweep.` in front of them; `seed` is the experiment's."""


def make_sweep(tree: Mapping[str, Any]) -> Sweep:
    """A checked sweep from plain containers.

    Raises:
        ConfigError: One line: the key, its value, what is allowed.
    """
    sweep = parse(Sweep, tree, "")
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
        ConfigError: The sweep does not exist or something in it is wrong.
    """
    name, own, rest = "", {}, []
    for text in arguments:
        key, sep, value = text.partition("=")
        if not sep or not key:
            raise ConfigError(f"{text!r} is not an override; write key=value")
        head = key.split(".")[0]
        if key == "sweep":
            name = value
        elif head == "sweep":
            own[key.removeprefix("sweep.")] = _yaml(key, value)
        elif head in SHORT:
            own[key] = _yaml(key, value)
        else:
            rest.append(text)
    if not name:
        raise ConfigError(f"sweep: missing; set sweep=NAME, one of: {', '.join(sweep_names())}")
    tree = read_file(name)
    for key, value in own.items():
        _put(tree, key, value)
    sweep = make_sweep(tree)
    return sweep, (*sweep.experiment, *rest)


def sweep_names() -> list[str]:
    return sorted(path.stem for path in (folder() / "sweep").glob("*.yaml"))


def read_file(name: str) -> dict[str, Any]:
    """The mapping in `configs/sweep/<name>.yaml`, or in a file of one's own.

    Raises:
        ConfigError: There is none, or it is not YAML.
    """
    own = name.endswith((".yaml", ".yml"))
    path = user_path(name, "sweep") if own else folder() / "sweep" / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(unknown("sweep", name, sweep_names()))
    return {"name": path.stem, **read_yaml(path, "sweep")}


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    """`space.server.q` is the parameter `server.q` (null removes it); other dots are sections."""
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


def _yaml(key: str, text: str) -> Any:
    try:
        return parse_yaml(text)
    except DocumentError as err:
        raise ConfigError(f"{key}: {shown(text)} is not a YAML value: {err}") from err


def _direction(name: str) -> Direction:
    if any(word in name for word in SMALLER_IS_BETTER):
        return "min"
    if "accuracy" in name:
        return "max"
    raise ConfigError(f"objective: say whether {name!r} should be large or small: objective={{{name}: max}}")
