"""Lets methods that are compared train equally often, by more passes of those that would train less.

Some methods take two batches for a step, or train two models. Compared with them, a method that takes one
trains less, and what looks like a better method may be more training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TypeVar

from rayfed.config.schema import Config
from rayfed.engine.measure_client import batches_a_step
from rayfed.engine.setup import Setup
from rayfed.errors import ConfigError

ROUNDING = 1e-6

C = TypeVar("C", bound=Config)


def batches_of(setups: Sequence[Setup]) -> float:
    """Expected training batches of all clients and rounds of a prepared experiment, or of its folds.

    A client trains once to find out how many its method takes for a step. Nothing is written.

    Raises:
        RayFedError: The client failed.
    """
    return batches_a_step(setups[0]) * sum(map(_steps, setups))


def _steps(setup: Setup) -> float:
    """Expected steps of all clients in all rounds, where each trains its model once a visit."""
    experiment = setup.experiment
    each = [setup.context.train.steps(info.num_examples) for info in experiment.clients.values()]
    return experiment.rounds * experiment.clients_per_round * fmean(each)


def passes(batches: Mapping[str, float]) -> dict[str, int]:
    """By what each row multiplies its passes, so that all train as often as the row that trains most.

    Args:
        batches: Training batches of each row; 0: the row trains nothing, and stays as it is.

    Raises:
        ConfigError: A row would need a part of a pass.
    """
    most = max(batches, key=lambda name: batches[name])
    factors = {}
    for name, count in batches.items():
        ratio = batches[most] / count if count else 1.0
        factors[name] = round(ratio)
        if abs(ratio - factors[name]) > ROUNDING * ratio:
            raise ConfigError(
                f"equal_steps: {most} trains on {ratio:.3g} times as many batches as {name}, which no whole "
                f"number of passes makes equal; leave one of the two out, or leave out equal_steps"
            )
    return factors


def with_passes(config: C, name: str, factor: int) -> C:
    """The config of a row with so many times as many training steps in each visit of a client.

    Raises:
        ConfigError: The number of its steps depends on other clients.
    """
    train = config.train
    if factor == 1:
        return config
    if train.local_steps == "min_over_clients_plus_one":
        raise ConfigError(
            f"equal_steps: the steps of {name} depend on the smallest client "
            f"(train.local_steps={train.local_steps}); set train.local_steps=full_epoch or a number"
        )
    limit = None if train.max_steps is None else train.max_steps * factor
    if isinstance(train.local_steps, int):
        longer = replace(train, local_steps=train.local_steps * factor, max_steps=limit)
    else:
        longer = replace(train, epochs=train.epochs * factor, max_steps=limit)
    return replace(config, train=longer)
