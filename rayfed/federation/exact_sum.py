"""The weighted mean of clients' tensors, exact up to its last rounding, so that no order can change a bit.

Sums are held without rounding (`rayfed.federation.exact_lanes`). So the bytes of a mean depend on neither the
order in which clients are added nor on how they are divided among partial sums. What holds:

- The mean in float32, bfloat16 and float16 is the exact mean, rounded once to the nearest number, and of two
  to the even one, for all values, the smallest denormal ones included.
- The mean in float64 is within 0.51 units in the last place where it is above 2^-700. Parts of its values
  below 2^-766 are left out, and values above 2^700 count as infinite.
- NaN, or infinities of both signs, give NaN; infinities of one sign give that infinity. A mean of exactly
  zero is +0, whatever the signs of the zeros.
- Integers up to 2^53 are exact, and have a mean in torch's default type. Complex numbers are pairs of real
  ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import gcd, lcm
from typing import TypeAlias

import torch
from torch import Tensor

from rayfed.federation.exact_lanes import CACHED, ExactLanes, rounded_quotient
from rayfed.types import Params

RANGE = 200
"""Weights are from 2^-RANGE to 2^RANGE."""

Layout: TypeAlias = tuple[torch.dtype, tuple[tuple[str, torch.Size], ...]]
"""Type of a mean, and names and shapes of the tensors that lie one behind the other in a flat sum."""


class ExactSum:
    """Weighted sums of clients' tensors by name, each with the sum of the weights of its holders."""

    def __init__(self) -> None:
        self._sums: dict[Layout, ExactLanes] = {}

    def add(self, clients: Sequence[Mapping[str, Tensor]], weights: Sequence[float | Fraction]) -> None:
        """Add the tensors of clients that hold the same names.

        Args:
            clients: Tensors by name of each client, all on one device, with one shape for each name.
            weights: One binary fraction for each client.

        Raises:
            ValueError: A weight is not between 2^-200 and 2^200.
        """
        bad = [weight for weight in weights if not 2.0**-RANGE <= weight <= 2.0**RANGE]
        if bad:
            raise ValueError(f"weight {float(bad[0])} is not between 2^-{RANGE} and 2^{RANGE}")
        exact = [Fraction(weight) for weight in weights]
        for dtype, names in _names_by_type(clients).items():
            rows = [_flat([client[name] for name in names]) for client in clients]
            layout = dtype, tuple((name, clients[0][name].shape) for name in names)
            self._of(layout, len(rows[0]), rows[0].device).add(rows, exact)

    def merge(self, other: ExactSum) -> None:
        """Add another sum, which keeps its values."""
        for layout, lanes in other._sums.items():
            self._of(layout, lanes.size, lanes.device).merge(lanes)

    def mean(self) -> Params:
        """The weighted mean of each name over the clients that sent it.

        Raises:
            ValueError: Clients sent different shapes under one name.
        """
        layouts = Counter(name for _, names in self._sums for name, _ in names)
        means: Params = {}
        parts: dict[str, list[tuple[torch.dtype, torch.Size, ExactLanes]]] = {}
        for (dtype, names), lanes in self._sums.items():
            ends = [0, *accumulate(shape.numel() * (1 + dtype.is_complex) for _, shape in names)]
            pieces = dict(zip(names, pairwise(ends), strict=True))
            if all(layouts[name] == 1 for name, _ in names):
                flat = lanes.mean(dtype.to_real())
                for (name, shape), (low, high) in pieces.items():
                    means[name] = _shaped(flat[low:high], dtype, shape)
                continue
            for (name, shape), (low, high) in pieces.items():
                parts.setdefault(name, []).append((dtype, shape, lanes.piece(low, high)))
        return means | {name: _mean_of(name, of_name) for name, of_name in parts.items()}

    def _of(self, layout: Layout, size: int, device: torch.device) -> ExactLanes:
        if layout not in self._sums:
            self._sums[layout] = ExactLanes(size, device)
        return self._sums[layout]


def mean_at_once(clients: Sequence[Mapping[str, Tensor]], weights: Sequence[Fraction]) -> Params:
    """The mean of `ExactSum`, to the bit, of clients that are all here, for most values in less time.

    Args:
        clients: As of `ExactSum.add`.
        weights: As of `ExactSum.add`.
    """
    means: Params = {}
    for dtype, names in _names_by_type(clients).items():
        rows = [_flat([client[name] for name in names]) for client in clients]
        if {row.dtype for row in rows} == {dtype} and _can_be_quick(dtype, weights):
            flat = _quick_mean(rows, weights, dtype)
            parts = flat.split([clients[0][name].numel() for name in names])
            means |= {n: part.view(clients[0][n].shape).clone() for n, part in zip(names, parts, strict=True)}
        else:
            total = ExactSum()
            total.add([{name: client[name] for name in names} for client in clients], weights)
            means |= total.mean()
    return {name: means[name] for name in clients[0]}


MOST_WEIGHT = 2**24
"""Largest sum of weights, whole numbers, of a quick mean."""
SPARE = 28
"""Bits of a float64 besides those of a value in float32, but one, as the comparison itself rounds."""


def _can_be_quick(dtype: torch.dtype, weights: Sequence[Fraction]) -> bool:
    """Whether `_quick_mean` takes values of a type with these weights."""
    whole = all(weight.denominator == 1 for weight in weights)
    return dtype in (torch.float32, torch.bfloat16, torch.float16) and whole and sum(weights) <= MOST_WEIGHT


def _quick_mean(rows: Sequence[Tensor], weights: Sequence[Fraction], dtype: torch.dtype) -> Tensor:
    """The weighted mean of rows, each of shape (n,), with sums in float64 where these have no error.

    All terms of a sum are whole multiples of the last bit of its smallest value that is not 0, and no partial
    sum is above the largest value times the sum of the weights. Where both fit into the bits of a float64, no
    addition rounds, in whatever order. The other sums, and those with some zeros, are left to `ExactLanes`.
    """
    size, total = len(rows[0]), sum(weights, Fraction(0))
    factors = torch.tensor([float(weight) for weight in weights], dtype=torch.float64, device=rows[0].device)
    sums = torch.empty(size, dtype=torch.float64, device=rows[0].device)
    is_exact = torch.empty(size, dtype=torch.bool, device=rows[0].device)
    most = 2.0**SPARE / float(total)
    width = max(CACHED // len(rows), 1)
    for low in range(0, size, width):
        block = torch.stack([row[low : low + width] for row in rows])
        sums[low : low + width] = factors @ block.double()
        block = block.float().abs_()
        largest = block.amax(0)
        is_exact[low : low + width] = (largest <= block.amin(0) * most) & largest.isfinite()
    sums.masked_fill_(~is_exact, 0.0)
    mean = rounded_quotient([sums.add_(0.0)], total, dtype)  # + 0.0: a mean of zeros is +0
    if not is_exact.all():
        rest = (~is_exact).nonzero()[:, 0]
        lanes = ExactLanes(len(rest), mean.device)
        lanes.add([row[rest] for row in rows], weights)
        mean[rest] = lanes.mean(dtype)
    return mean


def _mean_of(name: str, parts: Sequence[tuple[torch.dtype, torch.Size, ExactLanes]]) -> Tensor:
    """The mean of one tensor from its partial sums, the first of which is overwritten."""
    dtype, shape, whole = parts[0]
    for other_type, other_shape, lanes in parts[1:]:
        if other_shape != shape:
            raise ValueError(f"clients sent {name!r} with shapes {tuple(shape)} and {tuple(other_shape)}")
        dtype = torch.promote_types(dtype, other_type)
        whole.merge(lanes)
    return _shaped(whole.mean(dtype.to_real()), dtype, shape)


def _shaped(flat: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """A new tensor of these numbers."""
    if dtype.is_complex:
        return torch.view_as_complex(flat.view(*shape, 2).clone())
    return flat.view(shape).clone()


def _names_by_type(clients: Sequence[Mapping[str, Tensor]]) -> dict[torch.dtype, list[str]]:
    """Names by the type of their mean."""
    names: dict[torch.dtype, list[str]] = {}
    for name, value in clients[0].items():
        dtype = torch.result_type(value, 1.0)
        for client in clients[1:]:
            dtype = torch.promote_types(dtype, client[name].dtype)
        names.setdefault(dtype, []).append(name)
    return names


def _flat(values: Sequence[Tensor]) -> Tensor:
    """The real numbers of tensors one after the other, shape (n,)."""
    real = [(torch.view_as_real(value) if value.is_complex() else value).reshape(-1) for value in values]
    return real[0] if len(real) == 1 else torch.cat(real)


def in_range(weights: Sequence[float]) -> list[Fraction]:
    """Weights times one number, so that `ExactSum` can add them; 0 for those below 2^-200 of the largest.

    Weights that are in the ratio of small integers become these, whose products have fewer parts.

    >>> in_range([0.25, 0.5]), in_range([1 / 3, 1 / 3])
    ([Fraction(1, 1), Fraction(2, 1)], [Fraction(1, 1), Fraction(1, 1)])
    """
    exact = [Fraction(weight) for weight in weights]
    common = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    shared = gcd(*whole)
    beyond = max(0, (max(whole) // shared).bit_length() - RANGE)
    scaled = [Fraction(number // shared, 2**beyond) for number in whole]
    return [weight if weight >= Fraction(1, 2**RANGE) else Fraction(0) for weight in scaled]
