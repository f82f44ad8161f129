"""Arithmetic on tensors by name. All functions leave their arguments unchanged."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rayfed.types import Params, Update, is_statistic


def subtract(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Params:
    """Differences a - b for all names of a."""
    return {name: value - b[name] for name, value in a.items()}


def sq_norm(a: Mapping[str, Tensor]) -> Tensor:
    """Sum of squares over all tensors; a scalar with gradient."""
    return torch.stack([value.pow(2).sum() for value in a.values()]).sum()


def sq_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Sum of squared differences over all names in a; a scalar with gradient."""
    return sq_norm(subtract(a, b))


def by_name(updates: Sequence[Update]) -> dict[str, list[Tensor]]:
    """The values of every name, in the order of the clients that sent it."""
    values: dict[str, list[Tensor]] = {}
    for update in updates:
        for name, value in update.params.items():
            values.setdefault(name, []).append(value)
    return values


def mean_by_name(updates: Sequence[Update], weights: Iterable[float]) -> Params:
    """Weighted mean of every name over the clients that hold it.

    Updates are added one at a time in the order given, so that the result does not depend on where or when a
    client ran.

    Args:
        updates: Answers of clients; each may hold any subset of the names.
        weights: One non-negative number per update; they are normalised per name over its holders.

    Returns:
        The mean of each name that at least one client with positive weight holds. Other names are absent, so
        that they keep their previous value in the state.

    Raises:
        ValueError: The numbers of weights and updates differ, a weight is negative or not finite, or two
            clients sent different shapes under one name.
    """
    held = _with_weight(updates, [float(w) for w in weights])
    if held and all(update.params.keys() == held[0][0].params.keys() for update, _ in held):
        return _mean_of_all(held)
    mass: dict[str, float] = {}
    for update, weight in held:
        for name in update.params:
            mass[name] = mass.get(name, 0.0) + weight
    mean: Params = {}
    for update, weight in held:
        for name, value in update.params.items():
            share = weight / mass[name]
            if name not in mean:
                mean[name] = value * share
            else:
                _check_shapes(update, [name], [value.shape], [mean[name].shape])
                mean[name].add_(value, alpha=share)
    return mean


def _mean_of_all(held: Sequence[tuple[Update, float]]) -> Params:
    """As `mean_by_name` where all updates hold the same names: the same bits in half the time."""
    mass = functools.reduce(operator.add, (weight for _, weight in held), 0.0)
    first, weight = held[0]
    names = list(first.params)
    mean = [value * (weight / mass) for value in first.params.values()]
    shapes = [value.shape for value in mean]
    for update, weight in held[1:]:
        values = [update.params[name] for name in names]
        _check_shapes(update, names, [value.shape for value in values], shapes)
        if names:
            torch._foreach_add_(mean, values, alpha=weight / mass)
    return dict(zip(names, mean, strict=True))


def _check_shapes(
    update: Update, names: Sequence[str], sent: Sequence[torch.Size], others: Sequence[torch.Size]
) -> None:
    if sent != others:
        name, own, other = next(x for x in zip(names, sent, others, strict=True) if x[1] != x[2])
        shapes = f"{tuple(own)}, but other clients sent {tuple(other)}"
        raise ValueError(f"client {update.client!r} sent {name!r} with shape {shapes}")


def _with_weight(updates: Sequence[Update], weights: Sequence[float]) -> list[tuple[Update, float]]:
    if len(weights) != len(updates):
        raise ValueError(f"{len(weights)} weights for {len(updates)} updates; give one per update")
    bad = [w for w in weights if not 0 <= w < float("inf")]
    if bad:
        raise ValueError(f"aggregation weight {bad[0]} is not a finite number >= 0")
    return [(update, weight) for update, weight in zip(updates, weights, strict=True) if weight > 0]


def without_statistics(params: Mapping[str, Tensor]) -> Params:
    """Tensors that may take a step: all but running means and variances of BatchNorm layers."""
    return {name: value for name, value in params.items() if not is_statistic(name)}


def mean_of_statistics(updates: Sequence[Update]) -> Params:
    """Unweighted mean of each BatchNorm statistic over the clients that sent it.

    Server rules whose step is no mean use it for running means and variances, which are no directions of
    descent: a variance that is scaled or extrapolated is not that of any data, and may be negative.

    Args:
        updates: Answers of clients; each may hold any subset of the names.

    Returns:
        One tensor for each name for which `rayfed.types.is_statistic` holds, of the shape that clients sent.
    """
    only = [
        replace(update, params={n: value for n, value in update.params.items() if is_statistic(n)})
        for update in updates
    ]
    return mean_by_name(only, [1.0] * len(only))


def digest(params: Mapping[str, Tensor]) -> str:
    """SHA-256 hex digest over names, data types, shapes and bytes, in the sorted order of the names."""
    out = hashlib.sha256()
    for name in sorted(params):
        value = params[name].detach().cpu().contiguous()
        out.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        out.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return out.hexdigest()
