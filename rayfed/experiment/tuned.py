"""Methods that are compared after each was tuned: as many trials for each, on seeds that are not compared."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from rayfed.columns import Unit
from rayfed.config.compose import HALVES
from rayfed.errors import ConfigError, shown, unknown
from rayfed.experiment.compare_and_sweep import grid, named_experiments
from rayfed.experiment.experiment import Experiment
from rayfed.experiment.study.cells import Study
from rayfed.experiment.study.halving import SHARES, Base, Halving, TrialPoint, sign_of
from rayfed.experiment.study.study_folder import check_folder
from rayfed.federation.knob import Knob, plain_number
from rayfed.federation.method_registry import METHODS
from rayfed.report.tuned_values import RATE, TunedMethod, TunedValues

KnobLike: TypeAlias = Knob | tuple[str, float, float] | None

FIRST_SEED = 1000
"""The first seed of trials, where only their number is given."""

STEP = 3.0
"""Ratio of two neighbouring rates, where at most `WIDE` are tried."""

WIDE = 5
"""Number of rates with this ratio; of more rates the first and the last one are as far apart."""

LARGEST_WITHOUT = 2
"""Number of trials up to which all have other rates only."""

BY_OTHER_CLASSES = ("base_to_new", "cross_dataset")
"""Protocols whose score is of classes for which there are no validation examples."""

SUFFIX = "-trials"
"""End of the name of the folder of trials, next to that of the comparison."""


def tuned(
    experiments: Experiment | Sequence[Experiment] | Mapping[str, Experiment],
    trials: int = 8,
    seeds: int | Sequence[int] = 5,
    output: str | Path | None = None,
    *,
    tuning_seeds: int | Sequence[int] = 2,
    knobs: Mapping[str, KnobLike] | None = None,
    quiet: bool | None = None,
    at_once: int | Literal["auto"] = 1,
    margin: float | None = None,
    equal: Unit | None = None,
) -> Study:
    """Tune each experiment with as many trials as the others, and compare the best of each on fresh seeds.

    Five eighths of the trials have other rates of the clients (`train.lr`), by factors of 3 around that of
    the experiment; the others have the best of these rates and other values of the main hyperparameter that
    the method names (`Method.knob`), or further rates where it names none. Where the best rate is the
    smallest or the largest one, one of these trials goes beyond it. Trials are compared by the validation
    score of the model that the method deploys, never by test examples, with successive halving: after a
    quarter and after a half of the rounds only the better half goes on.

    Args:
        experiments: The experiment, several, or several by name.
        trials: Number of trials of each.
        seeds: The seeds of the comparison, or their number, counted from 0.
        output: Folder of the comparison; the trials are in the folder of this name and `-trials`. The same
            call goes on in both. None: nothing is written where you look.
        tuning_seeds: The seeds of each trial, or their number, counted from 1000; none of them is compared.
        knobs: By name of an experiment another main hyperparameter or range, such as
            `("local.mu", 0.01, 10.0)`; None for one: only its rate is tuned.
        quiet: As of `Experiment.run`.
        at_once: Number of runs side by side, as of `Study.run`.
        margin: As of `Study`.
        equal: As of `Study`, in the comparison.

    Returns:
        The study of the comparison. `Study.tuned` says what was tried and chosen, as its notes do.

    Raises:
        ConfigError: Something in the input is wrong, or there are no validation examples.
        PartsFailedError: All trials of a method failed, or runs of the comparison.
    """
    named = named_experiments([experiments] if isinstance(experiments, Experiment) else experiments)
    compared, own_seeds = _seeds(seeds, tuning_seeds)
    if not named or trials < 1:
        raise ConfigError(f"tuned: {len(named)} experiments and {trials} trials; give at least one of each")
    if strangers := set(knobs or {}) - set(named):
        raise ConfigError(unknown("tuned: knobs", str(min(strangers)), list(named)))
    grid(named, {}, compared, margin, equal)  # what is wrong is found before the first trial
    plans = {name: _plan_of(name, each, knobs or {}) for name, each in named.items()}
    with ExitStack() as kept:
        if output is None:
            folder = Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="rayfed-"))) / "trials"
        else:
            place = Path(output).expanduser()
            check_folder(place)
            folder = place.with_name(place.name + SUFFIX)
        bases = {name: plan.base for name, plan in plans.items() if plan.trains}
        halving = Halving(bases=bases, seeds=own_seeds, folder=folder, at_once=at_once, quiet=quiet)
        chosen = _tune(plans, halving, trials) if bases else {}
    methods = {name: chosen.get(name) or TunedMethod(trials=0, untuned=plans[name].untuned) for name in named}
    best = {name: each.changed(**methods[name].values) for name, each in named.items()}
    study = grid(best, {}, compared, margin, equal)
    study.tuned = TunedValues(
        trials=trials,
        score=halving.column,
        seeds=own_seeds,
        compared=compared,
        rounds=list(SHARES),
        methods=methods,
    )
    return study.run(output, at_once, quiet=quiet)


def _seeds(seeds: int | Sequence[int], tuning_seeds: int | Sequence[int]) -> tuple[list[int], list[int]]:
    """The seeds of the comparison, and those of the trials.

    Raises:
        ConfigError: One of them is missing, or in both.
    """
    compared = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    free = (seed for seed in itertools.count(FIRST_SEED) if seed not in compared)
    own = list(itertools.islice(free, tuning_seeds)) if isinstance(tuning_seeds, int) else list(tuning_seeds)
    if not compared or not own:
        raise ConfigError(
            f"tuned: {len(compared)} seeds and {len(own)} tuning_seeds; give at least one of each"
        )
    if both := sorted(set(compared) & set(own)):
        raise ConfigError(
            f"tuned: the seed {both[0]} is in seeds and in tuning_seeds; a seed by which values were chosen "
            f"cannot be compared: choose others"
        )
    return compared, own


@dataclass(frozen=True, kw_only=True)
class TuningPlan:
    """The tuned values of a method, before they are chosen.

    Attributes:
        base: Its experiment.
        knob: Its main hyperparameter, and the range of its values; None: only the rate is tuned.
        untuned: Why there is none; empty: there is one.
        trains: Whether it trains at all.
    """

    base: Base
    knob: Knob | None
    untuned: str = ""
    trains: bool = True

    @property
    def rate(self) -> float:
        """The rate of the experiment."""
        return self.base.config.train.lr

    @property
    def own(self) -> float | None:
        """The value of the main hyperparameter in the experiment; None: there is none, or it is null."""
        if self.knob is None:
            return None
        half, _, name = self.knob.key.partition(".")
        value: float | None = getattr(self.base.config, half).get(name)
        return value


def _plan_of(name: str, experiment: Experiment, knobs: Mapping[str, KnobLike]) -> TuningPlan:
    """The plan of an experiment.

    Raises:
        ConfigError: Its protocol cannot be tuned, or a hyperparameter is none of its method.
    """
    config = experiment.config()
    if config.protocol in BY_OTHER_CLASSES:
        raise ConfigError(
            f"tuned: protocol={config.protocol} scores a trained model on other classes; leave protocol out "
            f"to tune, and write the values that were chosen"
        )
    validated = config.evaluation.validation or True  # which kind is the experiment's choice
    own = experiment.changed(**{"evaluation.validation": validated})
    method = METHODS.load(config.algorithm)
    if not method.server.trains:
        return TuningPlan(base=Base(experiment=own), knob=None, untuned=str(method.knob or ""), trains=False)
    if name in knobs:
        given = knobs[name]
        knob: Knob | str | None = Knob(*given) if isinstance(given, list | tuple) else given
        if not (knob is None or isinstance(knob, Knob)):
            wanted = 'a key with its range, such as ("local.mu", 0.01, 10.0), or None'
            raise ConfigError(f"tuned: knobs: {name}: {shown(given)} is not {wanted}")
    else:
        knob = method.knob
    if not isinstance(knob, Knob):
        return TuningPlan(base=Base(experiment=own), knob=None, untuned=knob or "the method names none")
    half, _, key = knob.key.partition(".")
    known = {f"{part}.{each}" for part in HALVES for each in getattr(config, part) if each != "name"}
    if knob.key not in known:
        if name in knobs:
            raise ConfigError(unknown(f"tuned: knobs: {name}", knob.key, sorted(known)))
        return TuningPlan(base=Base(experiment=own), knob=None, untuned=f"the {half} half has no {key}")
    return TuningPlan(base=Base(experiment=own, knob=knob.key), knob=knob)


def _tune(plans: Mapping[str, TuningPlan], halving: Halving, trials: int) -> dict[str, TunedMethod]:
    """Choose the values of each method that trains."""
    training = {name: plan for name, plan in plans.items() if plan.trains}
    first = {name: [TrialPoint(rate) for rate in rates(plan.rate, trials)] for name, plan in training.items()}
    scores = halving.contest(first)
    best = {name: max(found, key=lambda point: found[point]) for name, found in scores.items()}
    later = {
        name: list(
            itertools.islice(_further(best[name], first[name], plan, trials), trials - len(first[name]))
        )
        for name, plan in training.items()
    }
    if any(later.values()):
        again = halving.contest({name: [best[name], *later[name]] for name in training})
        scores = {name: {**scores[name], **again[name]} for name in training}
    return {
        name: _chosen(plan, scores[name], [*first[name], *later[name]], halving.column)
        for name, plan in training.items()
    }


def number_of_rates(trials: int) -> int:
    """Number of first trials, which have other rates only: five eighths, and all of one or two.

    >>> [number_of_rates(trials) for trials in (1, 2, 3, 4, 8, 16)]
    [1, 2, 2, 3, 5, 10]
    """
    return trials - (trials * 3 // 8 if trials > LARGEST_WITHOUT else 0)


def ratio_of(number: int) -> float:
    """Ratio of two neighbouring rates. Args: number: of rates."""
    return STEP if number <= WIDE else STEP ** ((WIDE - 1) / (number - 1))


def rates(own: float, trials: int) -> list[float]:
    """The rates of the first trials: that of the experiment, then the next larger and smaller ones.

    >>> rates(0.1, 8)
    [0.1, 0.3, 0.0333, 0.9, 0.0111]
    """
    number = number_of_rates(trials)
    powers = [(place + 1) // 2 * (1 if place % 2 else -1) for place in range(number)]
    return [plain_number(own * ratio_of(number) ** power) if power else own for power in powers]


def _further(
    best: TrialPoint, first: Sequence[TrialPoint], plan: TuningPlan, trials: int
) -> Iterator[TrialPoint]:
    """The trials after the first ones, without end: what is tried first comes first."""
    known = {point.rate for point in first}
    ratio, left = ratio_of(len(first)), trials - len(first)
    if len(known) > 1 and best.rate in (min(known), max(known)):
        left -= 1
        yield TrialPoint(plain_number(best.rate * (ratio if best.rate == max(known) else 1 / ratio)))
    if plan.knob is not None and left > 0:
        for value in plan.knob.values(left):
            if plan.own is None or not math.isclose(value, plan.own, rel_tol=1e-6):
                yield TrialPoint(best.rate, value)
    for level in itertools.count(1):
        for odd in range(1, 2**level, 2):
            for sign in (1, -1):
                rate = plain_number(best.rate * ratio ** (sign * odd / 2**level))
                if rate not in known:
                    known.add(rate)
                    yield TrialPoint(rate)


def _chosen(
    plan: TuningPlan, scores: Mapping[TrialPoint, float], tried: Sequence[TrialPoint], column: str
) -> TunedMethod:
    """The best trial of a method, of those that ran all rounds. Args: tried: all of its trials."""
    best = max(scores, key=lambda point: scores[point])
    values: dict[str, float | None] = {RATE: best.rate}
    every = [point.rate for point in tried]
    ranges = {RATE: (min(every), max(every))}
    ends = [RATE] if len(set(every)) > 1 and best.rate in ranges[RATE] else []
    if plan.knob is not None:
        value = plan.own if best.knob is None else best.knob
        values[plan.knob.key] = value
        ranges[plan.knob.key] = (plan.knob.low, plan.knob.high)
        ends += [plan.knob.key] if plan.knob.is_end(value) else []
    return TunedMethod(
        trials=len(tried),
        values=values,
        score=scores[best] * sign_of(column),
        ranges=ranges,
        ends=ends,
        untuned=plan.untuned,
    )
