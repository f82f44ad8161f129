"""Operations for devices, each of which a GPU computes in one launch where Triton is installed.

Registered with torch as `torch.ops.rayfed`. Every device has the plain form, which consists of operations of
torch; on CUDA `rayfed.fast.triton_kernels` computes the same in one kernel. The CPU uses none of them.

Dropout draws from a counter and not from a stream: a number is Philox 4x32-10 (Salmon et al., Parallel random
numbers: as easy as 1, 2, 3, 2011) of the seed of the client's call, the layer, how often that layer drew
before, and the place of the element. So a client has the same mask alone and in any group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

ROUNDS = 10
FACTORS = (0xD2511F53, 0xCD9E8D57)
STEPS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF

library = torch.library.Library("rayfed", "DEF")
DRAW = "Tensor seeds, int layer, int call, float p, Tensor? counts=None"
library.define(f"dropout(Tensor x, {DRAW}) -> Tensor")
library.define(f"dropout_add_(Tensor(a!) y, Tensor x, {DRAW}) -> ()")
library.define(
    "add_norm(Tensor x, Tensor? branch, Tensor weight, Tensor bias, float eps, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
library.define(
    "add_norm_backward(Tensor grad, Tensor? through, Tensor total, Tensor mean, Tensor rstd, Tensor weight)"
    " -> (Tensor, Tensor)"
)


def philox(key: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four random words of 32 bits for every counter, as int64 tensors of the shape of all arguments.

    Args:
        key: int64.
        counter: Four words, as int64 tensors.
    """
    a, b, c, d = counter
    low, high = key & WORD, (key >> 32) & WORD
    for _ in range(ROUNDS):
        first, second = a * FACTORS[0], c * FACTORS[1]  # of 64 bits, which wrap around
        a, b = ((second >> 32) & WORD) ^ b ^ low, second & WORD
        c, d = ((first >> 32) & WORD) ^ d ^ high, first & WORD
        low, high = (low + STEPS[0]) & WORD, (high + STEPS[1]) & WORD
    return a, b, c, d


def keep_mask(
    shape: torch.Size, seeds: Tensor, layer: int, call: int, p: float, counts: Tensor | None = None
) -> Tensor:
    """Whether dropout keeps each element, bool, of this shape.

    Args:
        shape: That of the input, (K m, ..., d): rows k m to (k + 1) m belong to client k.
        seeds: Seed of each client's call, int64, shape (K,).
        layer: Number of the layer in the model.
        call: How often the layer drew before in this call of the client.
        p: Probability with which an element is dropped.
        counts: Added to `call` for each client, int64, shape (K,); None: nothing. A graph of operations, in
            which numbers are fixed, reads here what changes.
    """
    width, rows = shape[-1], shape[0] // len(seeds)
    quads = -(-width // 4)
    positions = shape[1:-1].numel()
    count = partial(torch.arange, device=seeds.device)
    key = (seeds + layer).view(-1, 1, 1, 1)
    row, place, quad = count(rows).view(-1, 1, 1), count(positions).view(-1, 1), count(quads)
    draw = torch.full_like(quad, call) if counts is None else (counts + call).view(-1, 1, 1, 1)
    numbers = philox(key, (quad, place, row, draw))
    whole = (len(seeds), rows, positions, quads)
    joined = torch.cat([number.expand(whole) for number in numbers], -1)[..., :width]
    return (joined >= round(p * 2**32)).reshape(shape)


def plain_dropout(
    x: Tensor, seeds: Tensor, layer: int, call: int, p: float, counts: Tensor | None = None
) -> Tensor:
    """X / (1 - p) where `keep_mask`, else 0; rounded once from float32, or from float64 where x is that."""
    wide = x if x.dtype == torch.float64 else x.float()
    return torch.where(keep_mask(x.shape, seeds, layer, call, p, counts), wide * (1 / (1 - p)), 0.0).to(
        x.dtype
    )


def plain_dropout_add_(
    y: Tensor, x: Tensor, seeds: Tensor, layer: int, call: int, p: float, counts: Tensor | None = None
) -> None:
    """Add `plain_dropout` to y in place."""
    y.add_(plain_dropout(x, seeds, layer, call, p, counts))


def plain_add_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum of x and a branch, and its layer norm over the last dimension in another type.

    Args:
        x: float32, shape (..., d).
        branch: Shape (..., d), of any type; None: the sum is x.
        weight: Shape (d,).
        bias: Shape (d,).
        eps: Added to the variance.
        dtype: Type of the norm's result.

    Returns:
        The sum (empty without a branch), the norm, and mean and 1 / deviation of each row, shape (..., 1).
    """
    total = x if branch is None else x + branch
    normed, mean, rstd = torch.native_layer_norm(total, total.shape[-1:], weight, bias, eps)
    return x.new_empty(0) if branch is None else total, normed.to(dtype), mean, rstd


def plain_add_norm_backward(
    grad: Tensor, through: Tensor | None, total: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the branch, the latter in the type of `grad`.

    Args:
        grad: Gradient of the norm, shape (..., d).
        through: Gradient of the sum, float32; None: it was not used.
        total: The sum, float32.
        mean: As `add_norm` returned it.
        rstd: As `add_norm` returned it.
        weight: That of the norm, shape (d,).
    """
    args = (grad.to(total.dtype), total, total.shape[-1:], mean, rstd, weight, None, [True, False, False])
    of_x = torch.ops.aten.native_layer_norm_backward(*args)[0]
    of_x = of_x if through is None else of_x + through
    return of_x, of_x.to(grad.dtype)


def _shape_of_add_norm(x: Tensor, branch: Any, weight: Any, bias: Any, eps: Any, dtype: Any) -> Any:
    rows = x.new_empty((*x.shape[:-1], 1))
    total = x.new_empty(0) if branch is None else torch.empty_like(x)
    return total, torch.empty_like(x, dtype=dtype), rows, torch.empty_like(rows)


PLAIN: dict[str, Callable[..., Any]] = {
    "dropout": plain_dropout,
    "dropout_add_": plain_dropout_add_,
    "add_norm": plain_add_norm,
    "add_norm_backward": plain_add_norm_backward,
}
"""The plain form of each operation, in operations of torch."""

SHAPES: dict[str, Callable[..., Any]] = {
    "dropout": lambda x, *_: torch.empty_like(x),
    "dropout_add_": lambda *_: None,
    "add_norm": _shape_of_add_norm,
    "add_norm_backward": lambda grad, through, total, *_: (torch.empty_like(total), torch.empty_like(grad)),
}
"""Shapes of the results, for tensors without values."""


def _in_triton(name: str, *args: Any) -> Any:
    """The kernel of CUDA; Triton is imported for the first one."""
    from rayfed.fast import triton_kernels

    if args[0].dtype == torch.float64:
        return PLAIN[name](*args)
    return getattr(triton_kernels, name)(*args)


for _name in PLAIN:
    library.impl(_name, PLAIN[_name], "CompositeExplicitAutograd")
    torch.library.register_fake(f"rayfed::{_name}", SHAPES[_name], lib=library)
    if find_spec("triton") is not None:
        library.impl(_name, partial(_in_triton, _name), "CUDA")
