"""A linear layer with a LoRA adapter, in fewer operations than PEFT's, for one client or for several at once.

Letters in shapes: K clients, m rows of a client, r rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn

from rayfed.models.stacked import Stacked

ADAPTER = "default"
"""PEFT's name of the only adapter of a layer."""

EXACT = ("cpu", "meta")
"""Devices where a layer adds as PEFT does, to the bit; on the meta device its operations are counted."""


class AddLowRank(torch.autograd.Function):
    """y + scale B A x for the rows of each client, with its own A and B; y is changed in place.

    Second derivatives do not exist.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Add the products.

        Args:
            ctx: What the backward pass needs.
            y: Output of the frozen layer, shape (K m, ..., d_out), contiguous.
            x: Input of the factors, shape (K m, ..., d_in).
            a: Factors A, shape (K, r, d_in).
            b: Factors B, shape (K, d_out, r).
            scale: alpha / rank.
        """
        ctx.save_for_backward(*_add_low_rank(y, x, a, b, scale), a, b)
        ctx.mark_dirty(y)
        ctx.scale = scale
        ctx.shape = x.shape
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, low, a, b = ctx.saved_tensors
        _, wants_x, wants_a, wants_b, _ = ctx.needs_input_grad
        back, own = _back(grad, b, ctx.scale)
        of_x = torch.bmm(back.mT, a).view(ctx.shape) if wants_x else None
        of_a = torch.bmm(back, rows) if wants_a else None
        of_b = _of_b(low, own, ctx.scale) if wants_b else None
        return grad, of_x, of_a, of_b, None


class FrozenAndLowRank(torch.autograd.Function):
    """W x + b + scale B A x for the rows of each client, with a frozen W and b and its own A and B.

    The same values as those of a frozen layer and of `AddLowRank` after it. The gradients of x through both
    are added in place, which spares a tensor as large as x. Second derivatives do not exist.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        """Multiply; the arguments are those of `F.linear` and of `AddLowRank`."""
        y = F.linear(x, weight, bias)
        ctx.save_for_backward(*_add_low_rank(y, x, a, b, scale), a, b, weight)
        ctx.scale = scale
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, low, a, b, weight = ctx.saved_tensors
        wants_x, _, _, wants_a, wants_b, _ = ctx.needs_input_grad
        back, own = _back(grad, b, ctx.scale)
        of_x = None
        if wants_x:
            of_x = F.linear(grad, weight.mT)
            of_x.view(rows.shape).baddbmm_(back.mT, a)
        of_a = torch.bmm(back, rows) if wants_a else None
        of_b = _of_b(low, own, ctx.scale) if wants_b else None
        return of_x, None, None, of_a, of_b, None


def _add_low_rank(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Add scale B A x to y in place; returns x by client (K, m, d_in) and A x (K, m, r)."""
    rows = x.reshape(len(a), -1, x.shape[-1])
    low = torch.bmm(rows, a.mT)  # (K, m, r), as it is computed for one client, to round alike
    y.view(len(b), -1, y.shape[-1]).baddbmm_(low, b.mT, alpha=scale)
    return rows, low


def _back(grad: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The gradient of A x for each client, shape (K, r, m), and that of its rows, shape (K, m, d_out)."""
    own = grad.reshape(len(b), -1, grad.shape[-1])
    # (K, r, m), and with a copy of b.mT: other layouts take up to five times as long.
    return torch.bmm(b.mT.contiguous(), own.mT).mul_(scale), own


def _of_b(low: Tensor, own: Tensor, scale: float) -> Tensor:
    """The gradient of B, shape (K, d_out, r), contiguous: autograd copies that of each client otherwise."""
    return torch.bmm(low.mT, own).mul_(scale).mT.contiguous()


class AdaptedLinear(Linear):
    """A linear layer of PEFT whose only adapter is a product of two factors, y = W x + b + scale B A x.

    For one client the values in float32 on a CPU are those of PEFT to the bit: what is left out is its choice
    among adapters in every pass, and a product with a scale of 1. In mixed precision and on other devices the
    products are added in place, and in mixed precision the input is rounded once, for W and A, and dropped
    out as it is then; PEFT makes float32 of it first. For several clients (`rayfed.models.stacked`), the
    products of all of them are added at once.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Output of the layer.

        Args:
            x: Rows (B, ..., d_in); those of K clients where both factors are `Stacked`.
            *args: Handed on to PEFT.
            **kwargs: Handed on to PEFT.
        """
        first, second = self.lora_A[ADAPTER], self.lora_B[ADAPTER]
        a: Any = first.weight
        plain = isinstance(second, nn.Linear) and not (args or kwargs or self.disable_adapters or self.merged)
        mixed = not x.is_meta and torch.is_autocast_enabled(x.device.type)  # which no meta device has
        if not plain or (x.dtype != a.dtype and not mixed):
            output: Tensor = super().forward(x, *args, **kwargs)
            return output
        layer: Any = self.base_layer
        if mixed:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        low = self.lora_dropout[ADAPTER](x)
        scale = self.scaling[ADAPTER]
        b: Any = second.weight
        stacked = isinstance(a, Stacked) and isinstance(b, Stacked)
        result: Tensor
        if stacked and low is x and not mixed and _is_frozen(layer):
            result = FrozenAndLowRank.apply(x, layer.weight, layer.bias, a.value, b.value, scale)
            return result
        if not stacked and (mixed or x.device.type not in EXACT):
            rows = first(low.reshape(-1, low.shape[-1]))
            # No view until the sum is made: a change in place of a view is copied in the backward pass.
            sums = layer(x.reshape(-1, x.shape[-1])).addmm_(rows, b.to(rows.dtype).mT, alpha=scale)
            result = sums.view(*x.shape[:-1], sums.shape[-1])
            return result
        y: Tensor = layer(x)
        if stacked:
            result = AddLowRank.apply(y, low, a.value.to(low.dtype), b.value.to(low.dtype), scale)
            return result
        added: Tensor = second(first(low))
        return y + (added if scale == 1 else added * scale)


def _is_frozen(layer: nn.Module) -> bool:
    """Whether a layer is torch's own linear layer, and neither its weight nor its bias is trained."""
    return type(layer) is nn.Linear and not any(p.requires_grad for p in layer.parameters())
