"""Combining LoRA factors of several clients.

The mean of the factors is not the mean of the products: with weights p that sum to 1,

    sum p_i B_i A_i = (sum p_i B_i)(sum p_i A_i) + sum p_i (B_i - mean B)(A_i - mean A),

so averaging A and B by name, as most papers do, drops the covariance of the factors. It is exact when all A
(or all B) are equal, or one client holds the layer.

What is offered. For every method, as `server.lora_agg`: `factor_mean` (average A and B) and `product_svd`
(the best rank-r approximation of the mean product, split again into factors). For every method, as
`tuning.freeze_a`: A is common and fixed, only B trains and travels, and the mean is exact. `stack` below is
exact for one round, but its rank grows with the clients, so it is a function and not an option. Merging a
mean product, or its residual, into the frozen weights is left out on purpose: every process of a node reads
one shared copy of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rayfed.types import Params, Update

LoraRule: TypeAlias = Literal["factor_mean", "product_svd"]

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
    names = dict.fromkeys(n for u in updates for n in u.params if n.endswith(f".{A}"))
    result: Params = {}
    for name in names:
        partner = name.removesuffix(A) + B
        holders = [
            (u.params[partner], u.params[name], w)
            for u, w in zip(updates, weights, strict=True)
            if w > 0 and name in u.params and partner in u.params and u.params[name].ndim == 2
        ]
        if holders:
            b, a = stack([(b, a) for b, a, _ in holders], [w for _, _, w in holders])
            result[partner], result[name] = refactor(b, a, old[name])
    return result
