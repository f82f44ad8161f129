"""Several experiments of one call: a comparison over seeds, a grid, and a search for hyperparameters."""

from __future__ import annotations

import html
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rayfed.columns import scale_of
from rayfed.errors import ConfigError, shown, unknown
from rayfed.experiment.experiment import Experiment, one_run
from rayfed.experiment.finished_run import Run
from rayfed.experiment.study.cells import Study
from rayfed.experiment.study.coordinates import PART, SEED
from rayfed.experiment.study.described import Fixed
from rayfed.experiment.study.run_cell import Stop
from rayfed.experiment.study.scores import larger_of
from rayfed.user_objects import title

if TYPE_CHECKING:
    import pandas as pd


def compare(
    experiments: Sequence[Experiment] | Mapping[str, Experiment],
    seeds: int | Sequence[int] = 1,
    output: str | Path | None = None,
    *,
    quiet: bool | None = None,
    at_once: int | Literal["auto"] = 1,
    stop: Stop | None = None,
) -> Study:
    """Run experiments on the same seeds, as a study of methods, seeds, and the parts of their protocol.

    Runs that `output` holds from an earlier call are not repeated, and one that was interrupted is continued.

    Args:
        experiments: The experiments, or these by name; the first one is what the others are compared with.
        seeds: The seeds, or their number, counted from 0.
        output: Folder of all runs; None: nothing is written where you look.
        quiet: As of `Experiment.run`.
        at_once: Number of runs side by side, as of `Study.run`.
        stop: As of `Study.run`.

    Returns:
        The study, whose `table` has a row for each experiment.

    Raises:
        ConfigError: There are fewer than two experiments, something in one of them is wrong, or the folder
            holds other files or runs of other experiments; found before the first run.
        PartsFailedError: Runs failed; the others are finished.
    """
    named = named_experiments(experiments)
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if len(named) < 2 or not chosen:
        what = f"{len(named)} experiments and {len(chosen)} seeds"
        raise ConfigError(f"compare: there are {what}; give two experiments or more, and one seed or more")
    return grid(named, {}, chosen).run(output, at_once, stop, quiet)


def grid(
    experiments: Experiment | Sequence[Experiment] | Mapping[str, Experiment],
    space: Mapping[str, Sequence[Any] | Mapping[str, Any]],
    seeds: int | Sequence[int] = 1,
) -> Study:
    """A study with one cell for each experiment, each combination of values, and each seed; it is not run.

    Args:
        experiments: The experiment, several, or several by name.
        space: By key, such as `train.lr`: the values, or these by the name that tables have for them, as
            objects need one.
        seeds: The seeds, or their number, counted from 0.

    Returns:
        The study; its coordinates are `method`, the keys and `seed`.

    Raises:
        ConfigError: There is no experiment, no value or no seed, or something in an experiment is wrong.
    """
    one = isinstance(experiments, Experiment)
    named = named_experiments([experiments] if isinstance(experiments, Experiment) else experiments)
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    choices = {key: _choices(key, values) for key, values in space.items()}
    if not named or not chosen:
        raise ConfigError(f"grid: there are {len(named)} experiments and {len(chosen)} seeds; give both")
    if taken := {"method", PART, SEED, "round"} & set(choices):
        raise ConfigError(f"grid: {min(taken)} cannot be a key here; give experiments by name, and seeds=")
    names = (*([] if one and choices else ["method"]), *choices, SEED)
    cells: list[tuple[dict[str, Any], Fixed]] = []
    for method, experiment in named.items():
        for values in itertools.product(*choices.values()):
            at = dict(zip(choices, (name for name, _ in values), strict=True))
            changes = dict(zip(choices, (value for _, value in values), strict=True))
            config = (experiment.changed(**changes) if changes else experiment).config()
            for seed in chosen:
                held = Fixed(replace(config, seed=int(seed)), experiment.given)
                whole = {"method": method, **at, SEED: seed}
                cells.append(({name: whole[name] for name in names}, held))
    return Study(cells)


def _choices(key: str, values: Any) -> list[tuple[Any, Any]]:
    """Name and value of each choice of a key."""
    if isinstance(values, Mapping) and values:
        return list(values.items())
    is_list = isinstance(values, Iterable) and not isinstance(values, str | Mapping)
    listed = list(values) if is_list else []
    if not listed:
        raise ConfigError(f"grid: {key}: {shown(values)} is no list of values, such as [0.01, 0.1]")
    if not all(each is None or isinstance(each, str | int | float | np.generic) for each in listed):
        raise ConfigError(f"grid: {key}: {shown(values)} has objects without a name; give a dict of them")
    return [(each, each) for each in listed]


def named_experiments(
    experiments: Sequence[Experiment] | Mapping[str, Experiment],
) -> dict[str, Experiment]:
    """The experiments by name: their own names, or those of their methods and of what differs."""
    named = dict(experiments) if isinstance(experiments, Mapping) else _by_method(experiments)
    for name, each in named.items():
        if not isinstance(each, Experiment):
            raise ConfigError(f"compare: {name}: {shown(each)} is no Experiment")
    return named


def _by_method(experiments: Sequence[Experiment]) -> dict[str, Experiment]:
    """The experiments by their methods, and where two have the same by what differs, or a number."""
    if isinstance(experiments, Experiment):
        raise ConfigError("compare: one experiment cannot be compared; give a list of two or more")
    methods = [title(experiment.config().algorithm).replace(":", ".") for experiment in experiments]
    by_method: dict[str, Experiment] = {}
    for method, experiment in zip(methods, experiments, strict=True):
        alike = [each for name, each in zip(methods, experiments, strict=True) if name == method]
        what = experiment.differs_from(alike)
        name = f"{method} {what}" if what else method
        number = 2
        while (own := name if number == 2 and name not in by_method else f"{name}-{number}") in by_method:
            number += 1
        by_method[own] = experiment
    return by_method


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Finished trials of a search.

    Attributes:
        trials: Values of each trial by key, and its run.
        metric: The column by which trials were compared, such as `val_accuracy`.
    """

    trials: Sequence[tuple[Mapping[str, Any], Run]]
    metric: str

    @property
    def best(self) -> Mapping[str, Any]:
        """The values of the best trial."""
        return self._best[0]

    @property
    def run(self) -> Run:
        """The run of the best trial."""
        return self._best[1]

    @property
    def _best(self) -> tuple[Mapping[str, Any], Run]:
        sign = 1 if self._is_larger_better else -1
        return max(self.trials, key=lambda trial: sign * trial[1].metrics[self.metric])

    @property
    def _is_larger_better(self) -> bool:
        return larger_of(self.metric, self.trials[0][1].metric)

    @property
    def notes(self) -> Sequence[str]:
        """Notes on the scores, such as on test sets with classes that clients do not have."""
        from rayfed.experiment.single_run import classes_in_words

        tested = classes_in_words(self.trials[0][1]._setup)
        return [tested] if tested else []

    @property
    def table(self) -> pd.DataFrame:
        """A row for each trial: its values and the score, the best one first."""
        import pandas as pd

        rows = [{**values, self.metric: run.metrics[self.metric]} for values, run in self.trials]
        return pd.DataFrame(rows).sort_values(self.metric, ascending=not self._is_larger_better)

    def _repr_html_(self) -> str:
        """HTML of the table and its notes, for a notebook."""
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return str(self.table.to_html(border=0)) + notes

    def __repr__(self) -> str:
        value = self.run.metrics[self.metric] * scale_of(self.metric)
        first = f"<Sweep of {len(self.trials)} trials: {self.metric} {value:.4g} with {dict(self.best)}>"
        return "\n".join([first, *self.notes])


def _key(run: Run, objective: str | None) -> str:
    """The column by which trials are compared; where none is named that of validation, if a run has one.

    Raises:
        ConfigError: The run has no such column, or it is no number.
    """
    metric = run.metric
    if objective is None:
        return f"val_{metric}" if f"val_{metric}" in run.metrics else metric
    numbers = [name for name, value in run.metrics.items() if isinstance(value, int | float)]
    if objective not in numbers:
        raise ConfigError(unknown("sweep: objective", objective, numbers))
    return objective


def sweep(
    experiment: Experiment,
    space: Mapping[str, Any],
    trials: int = 20,
    *,
    objective: str | None = None,
    seed: int = 0,
    quiet: bool | None = True,
) -> Sweep:
    """Search hyperparameters with Optuna's tree-structured Parzen estimator, one trial after the other.

    Trials run in this process, because only it knows objects that were defined in it. The command
    `rayfed sweep` runs trials of named parts next to each other, ends bad ones early, and can be resumed.

    Trials are compared by the model that the method deploys, the clients' own models of `local` and `ditto`,
    on the validation splits of the clients, and on their test splits where no client has a validation split;
    `Sweep.metric` says which. With `evaluation={"validation": "domains"}` each model is validated on the
    validation examples of all clients of its domain, as it is tested where these share their test set. The
    first trial has the values of the experiment, where
    the space contains them. Where every key has a list, combinations are drawn without repetition.

    Args:
        experiment: What each trial changes.
        space: By key, such as `local.mu`: a list of values, or a pair (low, high): whole numbers, if both
            are, and of positive numbers the logarithm is drawn uniformly.
        trials: Number of trials; fewer are run where the lists have fewer combinations.
        objective: Another column of `Run.metrics` by which trials are compared, such as `val_loss` or
            `worst_client_accuracy`.
        seed: Seed of the search.
        quiet: As of `Experiment.run`.

    Raises:
        ConfigError: A key or a range is wrong, or something in a trial.
    """
    if not space or trials < 1:
        raise ConfigError(f"sweep: {trials} trials of {len(space)} keys; give at least one of both")
    for key, values in space.items():
        _check_range(key, values)
    validated = experiment.config().evaluation.validation or True  # which kind is the experiment's choice
    base = experiment.changed(**{"evaluation.validation": validated})
    one_run(base.config(), base.given)
    own = _own_values(base, space)
    done: list[tuple[Mapping[str, Any], Run]] = []

    def score(values: Mapping[str, Any]) -> float:
        run = base.changed(**values).run(quiet=quiet)
        done.append((values, run))
        column = _key(run, objective)
        value: float = run.metrics[column]
        return -value if larger_of(column, run.metric) else value

    if all(isinstance(values, list) for values in space.values()):
        combinations = [dict(zip(space, each, strict=True)) for each in itertools.product(*space.values())]
        random.Random(seed).shuffle(combinations)
        combinations.sort(key=lambda each: each != own)  # the experiment's own values, then the others
        for values in combinations[:trials]:
            score(values)
    else:
        _search(space, own, trials, seed, score)
    return Sweep(trials=done, metric=_key(done[0][1], objective))


def _search(
    space: Mapping[str, Any],
    own: Mapping[str, Any] | None,
    trials: int,
    seed: int,
    score: Callable[[Mapping[str, Any]], float],
) -> None:
    """Let Optuna choose the values of each trial, after the experiment's own ones."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    if own is not None:
        places = {
            key: value.index(own[key]) if isinstance(value, list) else own[key]
            for key, value in space.items()
        }
        study.enqueue_trial(places)
    for _ in range(trials):
        trial = study.ask()
        study.tell(trial, score({key: _draw_value(trial, key, choices) for key, choices in space.items()}))


def _own_values(experiment: Experiment, space: Mapping[str, Any]) -> dict[str, Any] | None:
    """The experiment's own values of the keys of a space; None: the space does not contain them."""
    from rayfed.config.schema import to_dict

    tree = to_dict(experiment.config())
    own = {}
    for key, values in space.items():
        node: Any = tree
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        if not _contains(values, node):
            return None
        own[key] = node
    return own


def _contains(values: Any, value: Any) -> bool:
    """Whether a list has a value, or a range, of whole numbers if both its ends are."""
    if isinstance(values, list):
        return value in values
    kinds = (int,) if all(isinstance(end, int) for end in values) else (int, float)
    return type(value) in kinds and bool(values[0] <= value <= values[1])


def _check_range(key: str, values: Any) -> None:
    is_pair = (
        isinstance(values, tuple) and len(values) == 2 and all(isinstance(v, int | float) for v in values)
    )
    if isinstance(values, list) and values:
        return
    if not is_pair or not values[0] < values[1]:
        raise ConfigError(
            f"sweep: {key}: {shown(values)} is neither a list of values nor a pair (low, high) of numbers "
            "with low < high"
        )


def _draw_value(trial: Any, key: str, values: Any) -> Any:
    if isinstance(values, list):
        return values[trial.suggest_int(key, 0, len(values) - 1)]
    kind = trial.suggest_int if all(isinstance(value, int) for value in values) else trial.suggest_float
    return kind(key, *values, log=values[0] > 0)
