"""Limits of comparisons between floating-point numbers that were computed in two ways, and why.

One rounding changes a number by at most the unit roundoff u of its type: 2**-24 of it in float32, 2**-53 in
float64. How far two ways of computing may be apart follows from that, in one of three ways:

- `near`: n roundings, one after the other, of numbers that are at most `size` move a result by at most
  n u size. Both ways make them, so the limit is twice that. The number of roundings is the length of the
  sums plus the operations around them.
- `equally_near`: where nobody can count roundings (a network, some steps of an optimizer), the same code
  computes the same thing in float64. What one way has as its error there, the other way may have `SPREAD`
  times. This includes what an optimizer makes of roundings: it enlarges those of both ways.
- `printed`: a number that was published or worked out by hand with some digits is known to half a unit of the
  last one, and no better.

With `RAYFED_ROUNDINGS=FILE` each comparison appends a line with its test and the share of its limit that the
difference takes. `python -m tests.roundings` makes a table of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from rayfed.engine.loop import run_rounds
from rayfed.engine.setup import Setup
from rayfed.executors.inline import InlineExecutor
from rayfed.executors.worker import ClientContext, Weights
from rayfed.federation.executor import Call
from rayfed.models.put_back import PutBack
from rayfed.types import Params, Update

FILE = "RAYFED_ROUNDINGS"
SPREAD = 8
"""How many times the error of one way another way may have.

Errors of two orders of summation have the same distribution. The squared ratio of the norms of two draws
with k independent entries has an F distribution: with k = 4 the ratio is above 8 once in 1,400 draws, with
k = 10 once in ten million. A line that is wrong by 1 % has hundreds of times the error.
"""

SAME = 0.02
"""Most error of the first way, as a share of the largest tensor; beyond it the judge is of another case."""


def unit(precision: torch.dtype) -> float:
    """The unit roundoff: the largest relative error of one rounding to the nearest number of this type."""
    return torch.finfo(precision).eps / 2


def limit(roundings: int, size: float = 1.0, precision: torch.dtype = torch.float32) -> float:
    """How far two ways may be apart that each round `roundings` times numbers of at most `size`."""
    return 2 * roundings * unit(precision) * size


def near(
    found: Any,
    expected: Any,
    roundings: int,
    size: float | None = None,
    precision: torch.dtype = torch.float32,
    known: float = 0.0,
) -> None:
    """Fail unless both are within what `roundings` roundings of numbers of at most `size` explain.

    Args:
        found: A number, an array or a tensor.
        expected: The same from the other way, of the same shape.
        roundings: Roundings one after the other on the way to one entry: the length of the sums, and the
            operations before and after them.
        size: The largest number that is rounded on the way, not the result only; without it the largest
            number in `expected`.
        precision: The type in which the less exact of both ways computes.
        known: Error of `expected` itself, as of a number that was `printed`.

    Raises:
        AssertionError: They are further apart, or their shapes differ.
    """
    one, other = _array(found), _array(expected)
    assert one.shape == other.shape, (one.shape, other.shape)
    if size is None:
        size = float(np.abs(other).max(initial=0.0))
    difference = float(np.abs(one - other).max(initial=0.0))
    _check(difference, limit(roundings, size, precision), "largest entry", known)


def printed(digits: int) -> float:
    """The error of a number that is known with this many digits after the point: half a unit of the last."""
    return 0.5 * 10.0**-digits


def equally_near(one: Any, other: Any, exact: Any) -> None:
    """Fail unless the second way is as near to the exact values as the first way, but for `SPREAD`.

    An error is the norm of the difference between the tensors of one name, or at one place. An error that is
    smaller than one rounding of the largest tensor counts as that: values that are zero in exact arithmetic
    are nothing but roundings of larger ones.

    Args:
        one: Tensors, in a list or by name.
        other: The same from the other way.
        exact: The same from the first way in float64.

    Raises:
        AssertionError: A tensor is too far away, or names or shapes differ.
    """
    ones, others, exacts = (_tensors(each) for each in (one, other, exact))
    assert ones.keys() == others.keys() == exacts.keys()
    assert all(value.dtype != torch.float32 for value in _values(exact)), "the judge computes in float32"
    size = max((float(value.norm()) for value in exacts.values()), default=0.0)
    least = unit(torch.float32) * size
    for name, value in exacts.items():
        assert ones[name].shape == others[name].shape == value.shape, name
        own = float((ones[name] - value).norm())
        assert own <= SAME * size, f"{name}: the judge computes something else, {own:.1e} of {size:.1e} away"
        _check(float((others[name] - value).norm()), SPREAD * max(own, least), name)


def _check(difference: float, most: float, where: object, known: float = 0.0) -> None:
    if file := os.environ.get(FILE):
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" (")[0]
        beyond = max(difference - known, 0.0)
        share = beyond / most if most else float(beyond > 0)
        with Path(file).open("a") as lines:
            lines.write(json.dumps({"test": test, "share": share}) + "\n")
    most += known
    assert difference <= most, f"{where}: {difference:.2e} is more than {most:.2e}"


def _array(value: Any) -> np.ndarray:
    return np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value, dtype=np.float64)


def _values(tensors: Any) -> Sequence[Tensor]:
    return [*(tensors.values() if isinstance(tensors, Mapping) else tensors)]


def _tensors(values: Any) -> dict[Any, Tensor]:
    names = values if isinstance(values, Mapping) else range(len(values))
    return {n: v.detach().cpu().double() for n, v in zip(names, _values(values), strict=True)}


class Exact(InlineExecutor):
    """Computes in float64 what clients compute in float32, with the same random numbers."""

    def __init__(self, context: ClientContext, weights: Weights, *rest: Any, **options: Any) -> None:
        super().__init__(replace(context, features=""), weights, *rest, **options)
        worker = self.worker
        worker.model.double()
        worker.put_back = PutBack(worker.model)
        worker._start = {name: _double(value) for name, value in worker._start.items()}
        normalize = worker._normalize
        worker._normalize = lambda inputs: _double(normalize(inputs))

    def map(self, calls: Sequence[Call]) -> list[Update | None]:
        with exact_numbers():
            return super().map(calls)


def exactly(function: Callable[..., Any], *given: Any) -> Any:
    """The result of a function with copies in float64 of the networks and tensors that it is given."""
    copies = [deepcopy(each).double() if isinstance(each, nn.Module) else _double(each) for each in given]
    with exact_numbers():
        return function(*copies)


def exact_setup(setup: Setup) -> Setup:
    """The same experiment, which starts with values in float64; to be run by `Exact`."""
    return replace(setup, start={name: _double(value) for name, value in setup.start.items()})


def exactly_trained(setup: Setup) -> Params:
    """The tensors of the server after all rounds of an experiment, in float64."""
    exact = exact_setup(setup)
    with exact_numbers():
        *_, last = run_rounds(exact.experiment, Exact(exact.context, exact.weights), exact.start)
    return last.state.params


@contextmanager
def exact_play() -> Iterator[None]:
    """Within it `rayfed.testing` computes in float64."""
    from rayfed.testing import prepared, record_rounds

    def rounds(*args: Any) -> Iterator[Any]:
        with exact_numbers():
            yield from record_rounds(*args)

    with (
        patch("rayfed.testing.InlineExecutor", Exact),
        patch("rayfed.testing.prepared", lambda config: exact_setup(prepared(config))),
        patch("rayfed.testing.record_rounds", rounds),
    ):
        yield


def exact_numbers() -> AbstractContextManager[object]:
    """Within it `Tensor.float` makes float64, for servers whose clients are run by `Exact`."""
    return patch.object(Tensor, "float", Tensor.double)


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
