"""Frozen linear layers with oneDNN's matrix product, which on many CPUs is about twice as fast as torch's own.

torch multiplies float32 matrices with MKL, which does not use AVX-512 on processors of AMD. oneDNN does, and
is a part of torch too, but torch offers its linear layer to its own compiler only. Both give the same bits in
the sizes that are chosen here, so that results do not depend on which of them is used; where torch has no
oneDNN, everything is computed by torch's own product.

Letters in shapes: d_in and d_out, the widths of a layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDEST = 192
"""Most products that are summed for a number; for longer sums MKL adds the sums of parts."""

NARROWEST = 16
"""Fewest numbers of a row of the result; below, MKL adds in another order."""

ROWS = 256
"""Fewest rows; below, oneDNN's product takes as long as torch's own."""


def use_onednn(model: nn.Module) -> None:
    """Let all linear layers of a model use oneDNN's product in passes in which they are frozen.

    Nothing changes where torch was built without oneDNN, or lacks the operator that is used here.

    Args:
        model: The tuned model; layers of other classes than `nn.Linear` stay as they are.
    """
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = FrozenLinear


class FrozenLinear(nn.Linear):
    """A linear layer that is computed by oneDNN on a CPU while neither its weight nor its bias is trained."""

    def forward(self, input: Tensor) -> Tensor:
        """Output of the layer, shape (..., d_out).

        Args:
            input: Rows, shape (..., d_in).
        """
        trained = self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)
        if trained or not _fits(input, self.weight):
            return super().forward(input)
        output: Tensor = Product.apply(input, self.weight, self.bias)
        return output


class Product(torch.autograd.Function):
    """x W^T + b, with gradients for x only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply.

        Args:
            ctx: What the backward pass needs.
            x: Rows, shape (..., d_in).
            weight: Shape (d_out, d_in).
            bias: Shape (d_out,), or None.
        """
        ctx.save_for_backward(weight)
        d_out, d_in = weight.shape
        if d_in > WIDEST or d_out < NARROWEST:
            return F.linear(x, weight, bias)
        rows = x.reshape(-1, d_in).contiguous()
        product = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
        # No view, because nothing could be added in place to a view that a function of autograd returns.
        shaped: Tensor = torch.ops.aten._unsafe_view(product, (*x.shape[:-1], d_out))
        return shaped

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Gradient of x, which can be differentiated again; None for weight and bias."""
        (weight,) = ctx.saved_tensors
        return Product.apply(grad, weight.mT, None), None, None


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN computes this product, or its gradient, with the bits of torch and more quickly."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() >= ROWS * x.shape[-1]
        and min(weight.shape) <= WIDEST
        and not torch.is_autocast_enabled("cpu")
    )
