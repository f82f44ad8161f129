"""Combining LoRA factors of several clients.

The mean of the factors is not the mean of the products: with weights p that sum to 1,

    sum p_i B_i A_i = (sum p_i B_i)(sum p_i A_i) + sum p_i (B_i - mean B)(A_i - mean A),

so averaging A and B by name, as most papers do, drops the covariance of the factors. It is exact when all A
(or all B) are equal, or one client holds the layer.

What is offered, for every method, as `server.lora_agg`:

- `factor_mean`: average A and B (most papers).
- `product_svd`: the best rank-r approximation of the mean product, split again into factors.
- `stack_merge`: the mean product, which is that of the stacked factors, goes into a matrix R beside the
  frozen weight; A stays, B starts again from 0. Exact.
- `residual`: average A and B, and add to R what the product of the means leaves out. Exact.

and as `tuning.freeze_a`: A is common and fixed, only B trains and travels, and the mean is exact. The last
two rules need `tuning.residual=true`. R travels down as a dense matrix and is counted; it is not added to the
frozen weight itself, because every process of a node reads one shared copy of that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rayfed.federation.params import mean_by_name
from rayfed.types import RESIDUAL, Params, Update

LoraRule: TypeAlias = Literal["factor_mean", "product_svd", "stack_merge", "residual"]
EXACT: tuple[LoraRule, ...] = ("stack_merge", "residual")

A, B = "lora_A", "lora_B"
ROW_NORM = 1 / math.sqrt(3)
"""Expected norm of a row of A at its start: uniform in +-1/sqrt(d), d numbers."""

RELATIVE_ZERO = 1e-6
"""A singular value this much smaller than the largest one is rounding."""


def stack(factors: Sequence[tuple[Tensor, Tensor]], weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Factors of rank n r whose product is exactly the weighted mean of the products.

    Args:
        factors: (B, A) of n clients, shapes (d_out, r) and (r, d_in).
        weights: One per client, normalised here.

    Returns:
        [B_1 ... B_n] and [p_1 A_1; ...; p_n A_n].
    """
    total = sum(weights)
    rows = [a * (w / total) for (_, a), w in zip(factors, weights, strict=True)]
    return torch.cat([b for b, _ in factors], dim=1), torch.cat(rows, dim=0)


def refactor(b: Tensor, a: Tensor, old_a: Tensor) -> tuple[Tensor, Tensor]:
    """Best approximation of B A by factors of the rank of `old_a`, in float64.

    The singular values go into B, and rows of A get the norm they have at a fresh start. (Splitting them
    evenly would leave components of size 0 with zeros in both factors, which never receive a gradient again.)
    Components of size 0 keep the old row of A, with a zero column in B.

    Args:
        b: Factor of any rank k, shape (d_out, k).
        a: Factor, shape (k, d_in).
        old_a: Shape (r, d_in).

    Returns:
        (B, A) of shapes (d_out, r) and (r, d_in), in the type of the arguments.
    """
    rank = old_a.shape[0]
    new_b = torch.zeros(b.shape[0], rank, dtype=torch.float64)
    new_a = old_a.to(torch.float64, copy=True)
    qb, rb = torch.linalg.qr(b.double())
    qa, ra = torch.linalg.qr(a.double().T)
    u, s, vt = torch.linalg.svd(rb @ ra.T)
    kept = min(rank, int((s > RELATIVE_ZERO * s[0]).sum())) if s.numel() and s[0] > 0 else 0
    new_b[:, :kept] = qb @ u[:, :kept] * (s[:kept] / ROW_NORM)
    new_a[:kept] = ROW_NORM * (vt[:kept] @ qa.T)
    return new_b.to(b.dtype), new_a.to(a.dtype)


def product_mean(updates: Sequence[Update], weights: Sequence[float], old: Mapping[str, Tensor]) -> Params:
    """Refactored mean of the products of every adapter, over the clients that hold it with positive weight.

    Adapters of convolutions, and adapters of which only one factor travels, are not in the result: they are
    averaged by name.
    """
    result: Params = {}
    for layer, (b, a) in _stacked(updates, weights).items():
        result[f"{layer}.{B}"], result[f"{layer}.{A}"] = refactor(b, a, old[f"{layer}.{A}"])
    return result


def exact_mean(
    updates: Sequence[Update], weights: Sequence[float], old: Mapping[str, Tensor], rule: LoraRule
) -> Params:
    """Factors and residuals R with B A + R equal to the weighted mean of the clients' B_i A_i + R.

    Args:
        updates: Answers; a layer is averaged over its holders with positive weight.
        weights: One per update.
        old: Values at the beginning of the round, with the residuals that every holder had.
        rule: `residual` or `stack_merge`.
    """
    mean = mean_by_name(updates, weights)
    result: Params = {}
    for layer, (b, a) in _stacked(updates, weights).items():
        product = b.double() @ a.double()
        if rule == "residual":
            product -= mean[f"{layer}.{B}"].double() @ mean[f"{layer}.{A}"].double()
        else:
            result[f"{layer}.{A}"] = old[f"{layer}.{A}"].clone()
            result[f"{layer}.{B}"] = torch.zeros_like(old[f"{layer}.{B}"])
        before = old.get(f"{layer}{RESIDUAL}", torch.zeros_like(product))
        result[f"{layer}{RESIDUAL}"] = (before.double() + product).to(b.dtype)
    return result


def _stacked(updates: Sequence[Update], weights: Sequence[float]) -> dict[str, tuple[Tensor, Tensor]]:
    """`stack` of the holders' factors, by layer."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name in dict.fromkeys(n for u in updates for n in u.params if n.endswith(f".{A}")):
        partner = name.removesuffix(A) + B
        holders = [
            (u.params[partner], u.params[name], w)
            for u, w in zip(updates, weights, strict=True)
            if w > 0 and name in u.params and partner in u.params and u.params[name].ndim == 2
        ]
        if holders:
            factors = [(b, a) for b, a, _ in holders]
            found[name.removesuffix(f".{A}")] = stack(factors, [w for _, _, w in holders])
    return found
