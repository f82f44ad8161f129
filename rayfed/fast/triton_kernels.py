"""The operations of `rayfed.fast.kernels` as kernels of CUDA, each one launch, in Triton.

The plain forms there say what each one computes. Masks and what is dropped have the same bits as the plain
forms; the sums of a norm are added in another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
"""Counters of Philox, each of four random numbers, that a program of the GPU takes."""

NUMBERS = ("total", "quads", "width", "positions", "rows", "layer", "call", "threshold")
"""Numbers for whose values no separate kernel is compiled: some change in every step."""

OPTIONS = {"enable_fp_fusion": False}
"""A product is rounded before it is added to something, as in the plain forms."""


@triton.jit  # type: ignore[untyped-decorator]
def _round_to(value: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """A float32 in another type, rounded to the nearest; Triton's interpreter cuts bfloat16 off instead."""
    if kind == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        value = tl.where(value == value, near.to(tl.float32, bitcast=True), value)  # NaN stays
    return value.to(kind)


@triton.jit(do_not_specialize=NUMBERS)  # type: ignore[untyped-decorator]
def _dropout(
    x: tl.tensor,
    y: tl.tensor,
    seeds: tl.tensor,
    counts: tl.tensor,
    total: tl.tensor,
    quads: tl.tensor,
    width: tl.tensor,
    positions: tl.tensor,
    rows: tl.tensor,
    layer: tl.tensor,
    call: tl.tensor,
    threshold: tl.tensor,
    scale: tl.tensor,
    COUNTED: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    line = i // quads
    quad = i % quads
    row = line // positions
    seed = tl.load(seeds + row // rows, mask=inside, other=0) + layer
    own = (row % rows).to(tl.int32)
    place = (line % positions).to(tl.int32)
    count = tl.zeros_like(own) + call
    if COUNTED:
        count += tl.load(counts + row // rows, mask=inside, other=0).to(tl.int32)
    a, b, c, d = tl.philox(seed, quad.to(tl.int32), place, own, count.to(tl.int32))
    first = line.to(tl.int64) * width
    for lane in tl.static_range(4):
        number = a if lane == 0 else b if lane == 1 else c if lane == 2 else d
        channel = lane * quads + quad
        held = inside & (channel < width)
        value = tl.load(x + first + channel, mask=held, other=0).to(tl.float32) * scale
        value = _round_to(tl.where(number.to(tl.int64) >= threshold, value, 0.0), y.dtype.element_ty)
        if ADD:
            before = tl.load(y + first + channel, mask=held, other=0)
            value = _round_to(before.to(tl.float32) + value.to(tl.float32), y.dtype.element_ty)
        tl.store(y + first + channel, value, mask=held)


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(
    x: tl.tensor,
    branch: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    total: tl.tensor,
    normed: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    first = row.to(tl.int64) * width
    i = tl.arange(0, BLOCK)
    held = i < width
    value = tl.load(x + first + i, mask=held, other=0).to(tl.float32)
    if ADD:
        value += tl.load(branch + first + i, mask=held, other=0).to(tl.float32)
        tl.store(total + first + i, value, mask=held)
    middle = tl.sum(value, 0) / width
    apart = tl.where(held, value - middle, 0.0)
    spread = 1 / tl.sqrt(tl.sum(apart * apart, 0) / width + eps)
    scaled = apart * spread * tl.load(weight + i, mask=held, other=0) + tl.load(bias + i, mask=held, other=0)
    tl.store(normed + first + i, _round_to(scaled, normed.dtype.element_ty), mask=held)
    tl.store(mean + row, middle)
    tl.store(rstd + row, spread)


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm_backward(
    grad: tl.tensor,
    through: tl.tensor,
    total: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    weight: tl.tensor,
    of_x: tl.tensor,
    of_branch: tl.tensor,
    width: tl.tensor,
    PASSES: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    first = row.to(tl.int64) * width
    i = tl.arange(0, BLOCK)
    held = i < width
    spread = tl.load(rstd + row)
    own = tl.where(held, tl.load(total + first + i, mask=held, other=0) - tl.load(mean + row), 0.0) * spread
    given = tl.load(grad + first + i, mask=held, other=0).to(tl.float32)
    given *= tl.load(weight + i, mask=held, other=0)
    along = tl.sum(given * own, 0) / width
    found = (given - own * along - tl.sum(given, 0) / width) * spread
    if PASSES:
        found += tl.load(through + first + i, mask=held, other=0)
    tl.store(of_x + first + i, found, mask=held)
    if ADD:
        tl.store(of_branch + first + i, _round_to(found, of_branch.dtype.element_ty), mask=held)


def dropout(
    x: Tensor, seeds: Tensor, layer: int, call: int, p: float, counts: Tensor | None = None
) -> Tensor:
    """As `kernels.plain_dropout`."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _drop(y, x, (seeds, counts), (layer, call), p, add=False)
    return y


def dropout_add_(
    y: Tensor, x: Tensor, seeds: Tensor, layer: int, call: int, p: float, counts: Tensor | None = None
) -> None:
    """As `kernels.plain_dropout_add_`."""
    if y.is_contiguous():
        _drop(y, x.contiguous(), (seeds, counts), (layer, call), p, add=True)
    else:
        y.add_(dropout(x, seeds, layer, call, p, counts))


def _drop(
    y: Tensor, x: Tensor, clients: tuple[Tensor, Tensor | None], draw: tuple[int, int], p: float, add: bool
) -> None:
    seeds, counts = clients
    width = x.shape[-1]
    quads = -(-width // 4)
    positions = x[0].numel() // width
    total = len(x) * positions * quads
    rest = (total, quads, width, positions, len(x) // len(seeds), *draw, round(p * 2**32), 1 / (1 - p))
    tensors = (x, y, seeds, seeds if counts is None else counts)
    kind = {"COUNTED": counts is not None, "ADD": add, "BLOCK": BLOCK}
    _dropout[(triton.cdiv(total, BLOCK),)](*tensors, *rest, **kind, **OPTIONS)


def add_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `kernels.plain_add_norm`."""
    x = x.contiguous()
    branch = None if branch is None else branch.contiguous()
    width = x.shape[-1]
    rows = x.numel() // width
    total = x if branch is None else torch.empty_like(x)
    normed = torch.empty_like(x, dtype=dtype)
    mean, rstd = x.new_empty(2, *x.shape[:-1], 1).unbind(0)
    block = triton.next_power_of_2(width)
    given = (x, x if branch is None else branch, weight, bias, total, normed, mean, rstd, width, eps)
    _add_norm[(rows,)](*given, ADD=branch is not None, BLOCK=block, **OPTIONS)
    return x.new_empty(0) if branch is None else total, normed, mean, rstd


def add_norm_backward(
    grad: Tensor, through: Tensor | None, total: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """As `kernels.plain_add_norm_backward`."""
    grad, total = grad.contiguous(), total.contiguous()
    through = None if through is None else through.contiguous()
    width = total.shape[-1]
    rows = total.numel() // width
    of_x, of_branch = torch.empty_like(total), torch.empty_like(grad)
    given = (grad, grad if through is None else through, total, mean, rstd, weight, of_x, of_branch, width)
    options = {"PASSES": through is not None, "ADD": True, "BLOCK": triton.next_power_of_2(width)}
    _add_norm_backward[(rows,)](*given, **options, **OPTIONS)
    return of_x, of_branch
