"""Several experiments of one call: a comparison over seeds, and a grid."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rayfed.columns import Unit
from rayfed.errors import ConfigError, shown
from rayfed.experiment.experiment import Experiment
from rayfed.experiment.study.cells import Study
from rayfed.experiment.study.coordinates import PART, SEED, named_values
from rayfed.experiment.study.described import Fixed
from rayfed.experiment.study.run_cell import Stop
from rayfed.user_objects import title


def compare(
    experiments: Sequence[Experiment] | Mapping[str, Experiment],
    seeds: int | Sequence[int] = 1,
    output: str | Path | None = None,
    *,
    quiet: bool | None = None,
    at_once: int | Literal["auto"] = 1,
    stop: Stop | None = None,
    margin: float | None = None,
    equal: Unit | None = None,
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
        margin: As of `Study`.
        equal: As of `Study`.

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
    return grid(named, {}, chosen, margin, equal).run(output, at_once, stop, quiet)


def grid(
    experiments: Experiment | Sequence[Experiment] | Mapping[str, Experiment],
    space: Mapping[str, Sequence[Any] | Mapping[str, Any]] | None = None,
    seeds: int | Sequence[int] = 1,
    margin: float | None = None,
    equal: Unit | None = None,
) -> Study:
    """A study with one cell for each experiment, each combination of values, and each seed; it is not run.

    Args:
        experiments: The experiment, several, or several by name.
        space: By key, such as `train.lr`: the values, or these by the name that tables have for them, as
            objects need one; None: only experiments and seeds differ.
        seeds: The seeds, or their number, counted from 0.
        margin: As of `Study`.
        equal: As of `Study`.

    Returns:
        The study; its coordinates are `method`, the keys and `seed`.

    Raises:
        ConfigError: There is no experiment, no value or no seed, or something in an experiment is wrong.
    """
    one = isinstance(experiments, Experiment)
    named = named_experiments([experiments] if isinstance(experiments, Experiment) else experiments)
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    choices = {key: named_values(f"grid: {key}", values) for key, values in (space or {}).items()}
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
    return Study(cells, margin=margin, equal=equal)


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
