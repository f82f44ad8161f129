"""Linear layers with a LoRA adapter in fewer operations, for one client or for several at once.

Letters in shapes: K clients, m rows of a client, r rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.fast.dropout import Draw, drop
from rayfed.fast.stacked import Stacked, tokens_of_clients
from rayfed.models.backbone import Backbone
from rayfed.models.lora_layer import (
    ADAPTER,
    EXACT,
    AdaptedLinear,
    is_frozen,
    is_mixed,
    is_twice_differentiable,
)


def use_joint_adapters(model: nn.Module) -> None:
    """Let the adapted linear layers of a model be computed by `JointAdaptedLinear`."""
    for module in model.modules():
        if type(module) is AdaptedLinear:
            module.__class__ = JointAdaptedLinear


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


class AddLowRankInOneRow(torch.autograd.Function):
    """y + scale B A x as `AddLowRank`, where clients have different numbers of tokens in one row.

    Second derivatives do not exist.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Add the products.

        Args:
            ctx: What the backward pass needs.
            y: Output of the frozen layer, shape (1, T, d_out), contiguous.
            x: Input of the factors, shape (1, T, d_in).
            a: Factors A, shape (K, r, d_in).
            b: Factors B, shape (K, d_out, r).
            scale: alpha / rank.
        """
        ctx.tokens = [*tokens_of_clients()]
        low = x.new_empty(x.shape[1], a.shape[1])
        parts = zip(*(each.split(ctx.tokens) for each in (y[0], x[0], low)), a, b, strict=True)
        for out, rows, own_low, own_a, own_b in parts:
            torch.mm(rows, own_a.mT, out=own_low)
            out.addmm_(own_low, own_b.mT, alpha=scale)
        ctx.save_for_backward(x, low, a, b)
        ctx.mark_dirty(y)
        ctx.scale = scale
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, low, a, b = ctx.saved_tensors
        of_x = torch.empty_like(x) if ctx.needs_input_grad[1] else None
        of_a, of_b = torch.empty_like(a), torch.empty_like(b)
        parts = [each.split(ctx.tokens) for each in (grad[0], x[0], low)]
        for k, (own, rows, own_low) in enumerate(zip(*parts, strict=True)):
            back = torch.mm(own, b[k]).mul_(ctx.scale)
            torch.mm(back.mT, rows, out=of_a[k])
            torch.mm(own.mT, own_low, out=of_b[k])
            if of_x is not None:
                torch.mm(back, a[k], out=of_x[0].split(ctx.tokens)[k])
        return grad, of_x, of_a, of_b.mul_(ctx.scale), None


class FrozenAndLowRank(torch.autograd.Function):
    """W x + b + scale B A x for the rows of each client, with a frozen W and b and its own A and B.

    The same values as those of a frozen layer and of `AddLowRank` after it. The gradients of x through both
    are added in place, which spares a tensor as large as x. Second derivatives do not exist.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        frozen: tuple[Tensor, Tensor | None],
        a: Tensor,
        b: Tensor,
        scale: float,
        draw: Draw | None,
    ) -> Tensor:
        """Multiply.

        Args:
            ctx: What the backward pass needs.
            x: Input, shape (K m, ..., d_in).
            frozen: W, shape (d_out, d_in), and b, shape (d_out,), or None.
            a: Factors A, shape (K, r, d_in).
            b: Factors B, shape (K, d_out, r).
            scale: alpha / rank.
            draw: What is dropped of the input of A; None: nothing.
        """
        y = F.linear(x, *frozen)
        low = x if draw is None else torch.ops.rayfed.dropout(x, *draw.parts)
        ctx.save_for_backward(*_add_low_rank(y, low, a, b, scale), a, b, frozen[0])
        ctx.scale, ctx.draw = scale, draw
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():  # create_graph=True; results without their dependence on A would be wrong
            raise RuntimeError(
                "second derivatives of LoRA need `with twice_differentiable():` around both passes"
            )
        return _gradients(ctx, grad)


def _gradients(ctx: Any, grad: Tensor) -> Any:
    rows, low, a, b, weight = ctx.saved_tensors
    wants_x, _, wants_a, wants_b, _, _ = ctx.needs_input_grad
    back, own = _back(grad, b, ctx.scale)
    of_x = None
    if wants_x:
        of_x = F.linear(grad, weight.mT)
        if ctx.draw is None:
            of_x.view(rows.shape).baddbmm_(back.mT, a)
        else:
            torch.ops.rayfed.dropout_add_(of_x, torch.bmm(back.mT, a).view(of_x.shape), *ctx.draw.parts)
    of_a = torch.bmm(back, rows) if wants_a else None
    of_b = _of_b(low, own, ctx.scale) if wants_b else None
    return of_x, None, of_a, of_b, None, None


def _add_low_rank(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Add scale B A x to y in place; returns x by client (K, m, d_in) and A x (K, m, r)."""
    rows = x.reshape(len(a), -1, x.shape[-1])
    low = torch.bmm(rows, a.mT)  # (K, m, r), as it is computed for one client, to round alike
    y.view(len(b), -1, y.shape[-1]).baddbmm_(low, b.mT, alpha=scale)
    return rows, low


def _back(grad: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The gradient of A x for each client, shape (K, r, m), and that of its rows, shape (K, m, d_out)."""
    own = grad.reshape(len(b), -1, grad.shape[-1])
    if grad.device.type not in EXACT:
        return _scale(torch.bmm(own, b), scale).mT, own
    # (K, r, m), and with a copy of b.mT: other layouts take up to five times as long.
    return _scale(torch.bmm(b.mT.contiguous(), own.mT), scale), own


def _of_b(low: Tensor, own: Tensor, scale: float) -> Tensor:
    """The gradient of B, shape (K, d_out, r), contiguous: autograd copies that of each client otherwise."""
    if own.device.type not in EXACT:
        return _scale(torch.bmm(own.mT, low), scale)
    return _scale(torch.bmm(low.mT, own), scale).mT.contiguous()


def _scale(value: Tensor, scale: float) -> Tensor:
    """A new tensor times a number, in place."""
    return value if scale == 1 else value.mul_(scale)


class JointCasts(torch.autograd.Function):
    """Tensors in another type, and their gradients back in float32: one launch for all of them, each way."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        casts = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
        torch._foreach_copy_(casts, tensors)
        ctx.set_materialize_grads(False)
        learned = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(
            *(cast for cast, is_one in zip(casts, learned, strict=True) if not is_one)
        )
        return tuple(casts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        given = [grad for grad in grads if grad is not None]
        if torch.is_grad_enabled():  # of the gradients there will be gradients, too
            wide = [grad.float() for grad in given]
        else:
            wide = [torch.empty_like(grad, dtype=torch.float32) for grad in given]
            torch._foreach_copy_(wide, given)
        each = iter(wide)
        return None, *(None if grad is None else next(each) for grad in grads)


class JointAdaptedLinear(AdaptedLinear):
    """An adapted linear layer with few operations.

    For several clients (`rayfed.fast.stacked`), the products of all are added at once. On a device one
    client is a group of one, and the backward pass makes anew what was dropped. For one client on a CPU all
    is as in `AdaptedLinear`.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Output of the layer.

        Args:
            x: Rows (B, ..., d_in); those of K clients where both factors are `Stacked`.
            *args: Other arguments of the layer.
            **kwargs: Other arguments of the layer.
        """
        mixed = is_mixed(x)
        if args or kwargs or not self.is_plain_for(x, mixed):
            return super().forward(x, *args, **kwargs)
        if mixed:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        layer: Any = self.base_layer
        scale = self.scaling[ADAPTER]
        frozen = is_frozen(layer)
        together = frozen and x.device.type not in EXACT and not is_twice_differentiable()
        low, draw = drop(self.lora_dropout[ADAPTER], x, apart=not together)
        a: Any = self.lora_A[ADAPTER].weight
        b: Any = self.lora_B[ADAPTER].weight
        stacked = isinstance(a, Stacked) and isinstance(b, Stacked)
        result: Tensor
        if stacked and tokens_of_clients():
            factors = a.value.to(low.dtype), b.value.to(low.dtype)
            result = AddLowRankInOneRow.apply(layer(x), low, *factors, scale)
            return result
        if low is x and together:
            result = FrozenAndLowRank.apply(x, _in(x.dtype, layer), *self._factors(x.dtype), scale, draw)
            return result
        if not stacked:
            return self.sum_of_products(x, low, mixed)
        if low is x and frozen and not mixed:
            result = FrozenAndLowRank.apply(x, (layer.weight, layer.bias), a.value, b.value, scale, None)
            return result
        result = AddLowRank.apply(layer(x), low, a.value.to(low.dtype), b.value.to(low.dtype), scale)
        return result

    def _factors(self, dtype: torch.dtype) -> list[Tensor]:
        """A, shape (K, r, d_in), and B, shape (K, d_out, r), in a type; those of one client have K = 1."""
        kept = (self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight)
        values = vars(self).get(CAST) or [_value(factor).to(dtype) for factor in kept]
        clients = max(factor.clients if isinstance(factor, Stacked) else 1 for factor in kept)
        if clients == 1:
            return [value if value.ndim == 3 else value[None] for value in values]
        return [value if value.ndim == 3 else value.expand(clients, *value.shape) for value in values]


def _in(dtype: torch.dtype, layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a frozen layer in a type, which they have already."""
    return layer.weight.to(dtype), None if layer.bias is None else layer.bias.to(dtype)


def _value(factor: Any) -> Tensor:
    """The values of a factor: of one client, or of all clients."""
    value: Tensor = factor.value if isinstance(factor, Stacked) else factor
    return value


CAST = "_cast"
"""Attribute of a layer with its factors in the type of the pass that is being computed."""


def use_joint_casts(model: Backbone) -> None:
    """Let a network on a device cast the factors of all its layers at once in mixed precision."""
    layers = [layer for layer in model.net.modules() if isinstance(layer, JointAdaptedLinear)]
    layers = [layer for layer in layers if isinstance(layer.lora_B[ADAPTER], nn.Linear)]
    if layers:
        model.net.register_forward_pre_hook(partial(_cast_together, layers))
        model.net.register_forward_hook(partial(_forget_casts, layers), always_call=True)


def _cast_together(layers: list[JointAdaptedLinear], *_: Any) -> None:
    factors = [_value(each[ADAPTER].weight) for layer in layers for each in (layer.lora_A, layer.lora_B)]
    kind = factors[0].device.type
    if torch.is_autocast_enabled(kind):
        casts = JointCasts.apply(torch.get_autocast_dtype(kind), *factors)
        for layer, *pair in zip(layers, casts[::2], casts[1::2], strict=True):
            vars(layer)[CAST] = pair


def _forget_casts(layers: list[JointAdaptedLinear], *_: Any) -> None:
    for layer in layers:
        vars(layer).pop(CAST, None)
