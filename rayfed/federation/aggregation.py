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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rayfed.federation.exact_sum import in_range, mean_at_once
from rayfed.types import RESIDUAL, Params, Update, is_statistic

Weighting: TypeAlias = Literal["data_size", "uniform", "tokens"]
"""Ways to weigh the clients in the mean."""

LoraRule: TypeAlias = Literal["factor_mean", "product_svd", "stack_merge", "residual"]
EXACT: tuple[LoraRule, ...] = ("stack_merge", "residual")

A, B = "lora_A", "lora_B"
RELATIVE_ZERO = 1e-6
"""Singular values below this fraction of the largest one are treated as zero."""

SUMMED_AT_ONCE = 2**16
"""Values of a client in one sum: of several small tensors, or of a part of a large one."""


def client_weights(updates: Sequence[Update], weighting: Weighting) -> list[float]:
    """One weight per update, summing to 1; tokens counts examples where no client learned any token."""
    counts = client_counts(updates, weighting)
    total = sum(counts)
    return [count / total for count in counts]


def client_counts(updates: Sequence[Update], weighting: Weighting) -> list[float]:
    """The whole numbers that `client_weights` divides by their sum."""
    if weighting == "tokens" and any(u.learned for u in updates):
        return [float(u.learned) for u in updates]
    return [1.0 if weighting == "uniform" else float(u.num_examples) for u in updates]


def before_division(
    weights: Sequence[float], updates: Sequence[Update], weighting: Weighting
) -> Sequence[float]:
    """The numbers of `client_counts` if the weights are these divided by their sum, or else the weights.

    With them a mean has no error of these divisions, and no weight depends on which other clients answer.
    """
    counts = client_counts(updates, weighting)
    total = sum(counts)
    return counts if total and list(weights) == [count / total for count in counts] else weights


def mean_by_name(updates: Sequence[Update], weights: Iterable[float]) -> Params:
    """Weighted mean of every name over the clients that hold it, exact up to its last rounding.

    The result depends on neither the order of the updates nor on where or when a client ran
    (`rayfed.federation.exact_sum`). One tensor, or some small ones, are summed at a time.

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
    _check_shapes([update for update, _ in held])
    holders: dict[str, list[int]] = {}
    for index, (update, _) in enumerate(held):
        for name in update.params:
            holders.setdefault(name, []).append(index)
    same: dict[tuple[int, ...], list[str]] = {}
    for name, indices in holders.items():
        same.setdefault(tuple(indices), []).append(name)
    mean: Params = {}
    for those, names in same.items():
        exact = in_range([held[index][1] for index in those])
        counted = [(held[i][0].params, weight) for i, weight in zip(those, exact, strict=True) if weight]
        shares = [weight for _, weight in counted]
        for some in _parts(counted[0][0], names):
            mean |= _exact_mean([{name: params[name] for name in some} for params, _ in counted], shares)
    return {name: mean[name] for name in holders}


def _exact_mean(clients: Sequence[Params], weights: Sequence[Fraction]) -> Params:
    """Weighted mean of names that all clients hold; a large tensor is summed part by part."""
    name, first = next(iter(clients[0].items()))
    if len(clients[0]) > 1 or first.numel() <= SUMMED_AT_ONCE:
        return mean_at_once(clients, weights)
    flat = [client[name].reshape(-1).split(SUMMED_AT_ONCE) for client in clients]
    parts = [_exact_mean([{name: one} for one in part], weights)[name] for part in zip(*flat, strict=True)]
    return {name: torch.cat(parts).view(first.shape)}


def _parts(params: Params, names: Sequence[str]) -> Iterator[list[str]]:
    """Names in groups, each of at most `SUMMED_AT_ONCE` values or of one tensor."""
    part: list[str] = []
    values = 0
    for name in names:
        values += params[name].numel()
        if part and values > SUMMED_AT_ONCE:
            yield part
            part, values = [], params[name].numel()
        part.append(name)
    yield part


def _check_shapes(updates: Sequence[Update]) -> None:
    shapes: dict[str, torch.Size] = {}
    for update in updates:
        for name, value in update.params.items():
            if (other := shapes.setdefault(name, value.shape)) != value.shape:
                text = f"{tuple(value.shape)}, but other clients sent {tuple(other)}"
                raise ValueError(f"client {update.client!r} sent {name!r} with shape {text}")


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
