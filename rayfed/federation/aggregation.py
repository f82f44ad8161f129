"""Combines the tensors of clients: the weight of each client, the weighted mean, and rules for LoRA factors.

The mean of the LoRA factors is not the mean of the products: with weights p that sum to 1,

    sum p_i B_i A_i = (sum p_i B_i)(sum p_i A_i) + sum p_i (B_i - mean B)(A_i - mean A),

so averaging A and B by name, as most papers do, drops the covariance of the factors. It is exact when all A
(or all B) are equal, or one client holds the layer.

Every method has the option `server.lora_agg` with these rules:

- `factor_mean`: average A and B separately (most papers).
- `product_svd`: the best rank-r approximation of the mean product, split into factors again.
- `stack_merge`: add the mean product to a matrix R next to the frozen weight, keep A, and set B to 0. Exact.
  With `rounds=1` it is the one-round stack: the model with the clients' factors side by side, of rank n r,
  whose product R holds.
- `residual`: average A and B, and add to R the difference between the mean product and the product of the
  means. Exact.

With `tuning.freeze_a` A is fixed and common to all clients, only B is trained and sent, and the mean of the
factors is exact. The last two rules need `tuning.residual=true`. R is sent to clients as a dense matrix and
counted as traffic. It is not added to the frozen weight, of which all processes of a node share one copy.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rayfed.types import RESIDUAL, Params, Update, is_statistic

Weighting: TypeAlias = Literal["data_size", "uniform", "tokens"]
"""Ways to weigh the clients in the mean."""

LoraRule: TypeAlias = Literal["factor_mean", "product_svd", "stack_merge", "residual"]
EXACT: tuple[LoraRule, ...] = ("stack_merge", "residual")

A, B = "lora_A", "lora_B"
RELATIVE_ZERO = 1e-6
"""Singular values below this fraction of the largest one are treated as zero."""


def client_weights(updates: Sequence[Update], weighting: Weighting) -> list[float]:
    """One weight per update, summing to 1; tokens counts examples where no client learned any token."""
    raw = [1.0 if weighting == "uniform" else float(u.num_examples) for u in updates]
    if weighting == "tokens" and any(u.learned for u in updates):
        raw = [float(u.learned) for u in updates]
    total = sum(raw)
    return [w / total for w in raw]


def mean_by_name(updates: Sequence[Update], weights: Iterable[float]) -> Params:
    """Weighted mean of every name over the clients that hold it.

    Updates are added one at a time in the order given, so that the result does not depend on where or when a
    client ran.

    Args:
        updates: Answers of clients; each may hold any subset of the names.
        weights: One non-negative number per update; they are normalized per name over its holders.

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


def stack(factors: Sequence[tuple[Tensor, Tensor]], weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Factors of rank n r whose product is exactly the weighted mean of the products.

    Args:
        factors: Pairs (B, A) of n clients, shapes (d_out, r) and (r, d_in).
        weights: One per client; they are normalized to sum 1.

    Returns:
        [B_1 ... B_n], shape (d_out, n r), and [p_1 A_1; ...; p_n A_n], shape (n r, d_in).
    """
    total = sum(weights)
    rows = [a * (w / total) for (_, a), w in zip(factors, weights, strict=True)]
    return torch.cat([b for b, _ in factors], dim=1), torch.cat(rows, dim=0)


def refactor(b: Tensor, a: Tensor, old_a: Tensor) -> tuple[Tensor, Tensor]:
    """Best approximation of B A by factors of the rank of `old_a`, in float64.

    The singular values go into B = U S, and A = V^T, as in FlexLoRA's released code. Components with
    singular value 0 keep the old row of A, with a zero column in B: with zeros in both factors they would
    never receive a gradient again. The largest number of each new row of A is positive: singular vectors have
    no sign, and rounding would choose one, to which a kept momentum does not belong.

    Args:
        b: Left factor of any rank k, shape (d_out, k).
        a: Right factor, shape (k, d_in).
        old_a: Value of A before the round, shape (r, d_in).

    Returns:
        B and A, shapes (d_out, r) and (r, d_in), in the data types of `b` and `a`.
    """
    rank = old_a.shape[0]
    new_b = torch.zeros(b.shape[0], rank, dtype=torch.float64)
    new_a = old_a.to(torch.float64, copy=True)
    qb, rb = torch.linalg.qr(b.double())
    qa, ra = torch.linalg.qr(a.double().T)
    u, s, vt = torch.linalg.svd(rb @ ra.T)
    kept = min(rank, int((s > RELATIVE_ZERO * s[0]).sum())) if s.numel() and s[0] > 0 else 0
    rows = vt[:kept] @ qa.T
    sign = rows.gather(1, rows.abs().argmax(1, keepdim=True)).sign()  # (kept, 1)
    new_b[:, :kept] = qb @ u[:, :kept] * (sign[:, 0] * s[:kept])
    new_a[:kept] = sign * rows
    return new_b.to(b.dtype), new_a.to(a.dtype)


def product_mean(updates: Sequence[Update], weights: Sequence[float], old: Mapping[str, Tensor]) -> Params:
    """Rank-r approximation of the mean product of every LoRA adapter (`refactor`), as new factors by name.

    The mean is over the clients that hold the adapter and have positive weight. Adapters of convolutions, and
    adapters of which only one factor is sent, are not in the result; they are averaged by name.

    Args:
        updates: Answers of clients.
        weights: One per update.
        old: Values at the beginning of the round.
    """
    result: Params = {}
    for layer, (b, a) in _stack_factors(updates, weights).items():
        result[f"{layer}.{B}"], result[f"{layer}.{A}"] = refactor(b, a, old[f"{layer}.{A}"])
    return result


def exact_mean(
    updates: Sequence[Update], weights: Sequence[float], old: Mapping[str, Tensor], rule: LoraRule
) -> Params:
    """Factors and residuals R with B A + R equal to the weighted mean of the clients' B_i A_i + R.

    Args:
        updates: Answers of clients; a layer is averaged over its holders with positive weight.
        weights: One per update.
        old: Values at the beginning of the round, residuals R included.
        rule: `residual` or `stack_merge`.
    """
    mean = mean_by_name(updates, weights)
    result: Params = {}
    for layer, (b, a) in _stack_factors(updates, weights).items():
        product = b.double() @ a.double()
        if rule == "residual":
            product -= mean[f"{layer}.{B}"].double() @ mean[f"{layer}.{A}"].double()
        else:
            result[f"{layer}.{A}"] = old[f"{layer}.{A}"].clone()
            result[f"{layer}.{B}"] = torch.zeros_like(old[f"{layer}.{B}"])
        before = old.get(f"{layer}{RESIDUAL}", torch.zeros_like(product))
        result[f"{layer}{RESIDUAL}"] = (before.double() + product).to(b.dtype)
    return result


def by_layer(
    updates: Sequence[Update], weights: Sequence[float]
) -> dict[str, tuple[list[tuple[Tensor, Tensor]], list[float]]]:
    """Factors (B, A) of the clients that hold an adapter, and their weights, by name of the layer.

    Clients without weight, adapters of convolutions, and adapters of which only one factor is sent are left
    out.
    """
    layers: dict[str, tuple[list[tuple[Tensor, Tensor]], list[float]]] = {}
    for name in dict.fromkeys(n for u in updates for n in u.params if n.endswith(f".{A}")):
        partner = name.removesuffix(A) + B
        for update, weight in zip(updates, weights, strict=True):
            a, b = update.params.get(name), update.params.get(partner)
            if weight > 0 and a is not None and b is not None and a.ndim == 2:
                factors, shares = layers.setdefault(name.removesuffix(f".{A}"), ([], []))
                factors.append((b, a))
                shares.append(weight)
    return layers


def _stack_factors(updates: Sequence[Update], weights: Sequence[float]) -> dict[str, tuple[Tensor, Tensor]]:
    """Stacked factors (`stack`) of the clients that hold a layer, by layer."""
    return {layer: stack(factors, own) for layer, (factors, own) in by_layer(updates, weights).items()}
