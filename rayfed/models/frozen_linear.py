"""Frozen linear layers with oneDNN's matrix product, where it is quicker than torch's own with the same bits.

torch multiplies float32 matrices with MKL, which uses no AVX-512 on processors of AMD. oneDNN does, and
needed half the time on one of them, nine tenths on another; on one of Intel it is quicker for many rows with
a bias only. It is a part of torch, whose compiler calls it by an operator without a public name. A layer
uses it only if trials on this machine gave the same bits for its shape, so that no result depends on it, and
took less time; without that operator every layer is computed as before.

Letters in shapes: d_in and d_out, the widths of a layer.
"""

from __future__ import annotations

import statistics
import time
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 256
"""Fewest rows; for fewer, oneDNN takes about as long as torch's own product."""

TRIALS = (ROWS, 1037)
"""Numbers of rows with which both products are compared."""

WIDEST = 1024
"""Largest width for which they are compared; wider ones would delay the start of every client actor."""

REPEATS = 9
"""Times that both products are measured; the middle one of their differences counts."""

LARGEST = 2**27
"""Most multiplications of a product that is measured, which are a few milliseconds; larger ones are cut."""

FUNCTION = 2e-5
"""Seconds that a layer must save: so long take the forward and backward calls of a function in Python."""


def use_onednn(model: nn.Module) -> None:
    """Let the linear layers of a model use oneDNN in passes in which they are frozen.

    Args:
        model: The tuned model; layers of other classes than `nn.Linear` stay as they are.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FrozenLinear


class FrozenLinear(nn.Linear):
    """A linear layer that may use oneDNN on a CPU while neither its weight nor its bias is trained."""

    def forward(self, input: Tensor) -> Tensor:
        """Output of the layer, shape (..., d_out).

        Args:
            input: Rows, shape (..., d_in).
        """
        if not self.is_used_for(input) or self._saves(input) < FUNCTION:
            return super().forward(input)
        output: Tensor = Product.apply(input, self.weight, self.bias)
        return output

    def is_used_for(self, rows: Tensor) -> bool:
        """Whether this layer is frozen, and the rows are such as `frozen_product` is used for."""
        trained = self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)
        return not trained and _fits(rows)

    def _saves(self, rows: Tensor) -> float:
        """Seconds that oneDNN saves in the forward and the backward pass."""
        back = _saves(rows, self.weight.mT, None) if rows.requires_grad else 0.0
        return max(0.0, _saves(rows, self.weight, self.bias)) + max(0.0, back)


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
        return frozen_product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Gradient of x, which can be differentiated again; None for weight and bias."""
        (weight,) = ctx.saved_tensors
        return Product.apply(grad, weight.mT, None), None, None


def frozen_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x W^T + b without gradients, by oneDNN where that takes less time, as a new tensor.

    Args:
        x: Rows, shape (..., d_in).
        weight: Shape (d_out, d_in).
        bias: Shape (d_out,), or None.
    """
    d_out, d_in = weight.shape
    if _saves(x, weight, bias) <= 0:
        return F.linear(x, weight, bias)
    product = _onednn(x.reshape(-1, d_in).contiguous(), weight, bias)
    # No view, because nothing could be added in place to a view that a function of autograd returns.
    shaped: Tensor = torch.ops.aten._unsafe_view(product, (*x.shape[:-1], d_out))
    return shaped


@cache
def gives_same_bits(d_in: int, d_out: int, threads: int) -> bool:
    """Whether oneDNN gave the bits of torch's own product for random matrices of these widths.

    Args:
        d_in: Number of products that are summed.
        d_out: Width of the result.
        threads: Threads that compute, which decide how matrices are divided.
    """
    if max(d_in, d_out) > WIDEST:
        return False
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(d_out, d_in, generator=random)
    bias = torch.randn(d_out, generator=random)
    inputs = (torch.randn(rows, d_in, generator=random) for rows in TRIALS)
    cases = ((weight, bias), (weight, None), (weight.mT.contiguous().mT, None))  # the last one: backward
    with torch.no_grad():
        return all(torch.equal(F.linear(x, *case), _onednn(x, *case)) for x in inputs for case in cases)


def _saves(x: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    """Seconds that oneDNN saves for as many rows as x has; 0 where its bits are not the same."""
    d_out, d_in = weight.shape
    threads = torch.get_num_threads()
    if not gives_same_bits(d_in, d_out, threads):
        return 0.0
    rows = 2 ** ((x.numel() // x.shape[-1]).bit_length() - 1)
    return seconds_saved(d_in, d_out, rows, bias is not None, weight.is_contiguous(), threads)


@cache
def seconds_saved(d_in: int, d_out: int, rows: int, biased: bool, contiguous: bool, threads: int) -> float:
    """Seconds by which oneDNN's product took less time than torch's own in a trial; negative: more.

    Args:
        d_in: Number of products that are summed.
        d_out: Width of the result.
        rows: Number of rows; fewer are measured if the product is larger than `LARGEST`.
        biased: Whether a bias is added.
        contiguous: Whether the weight is contiguous; otherwise it is the transpose of one that is.
        threads: Threads that compute.
    """
    random = torch.Generator().manual_seed(0)
    x = torch.randn(min(rows, max(1, LARGEST // (d_in * d_out))), d_in, generator=random)
    weight = torch.randn(d_out, d_in, generator=random)
    weight = weight if contiguous else weight.mT.contiguous().mT
    bias = torch.randn(d_out, generator=random) if biased else None
    differences = []
    with torch.no_grad():
        for i in range(1 + REPEATS):  # the first one also prepares the libraries
            took: dict[Any, float] = {}
            for product in (F.linear, _onednn) if i % 2 else (_onednn, F.linear):
                began = time.perf_counter()
                product(x, weight, bias)
                took[product] = time.perf_counter() - began
            differences.append(took[F.linear] - took[_onednn])
    return statistics.median(differences[1:])


def _onednn(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of contiguous rows (n, d_in) with a weight in any layout, by oneDNN."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return product


def _fits(x: Tensor) -> bool:
    """Whether rows are such as oneDNN is used for."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.numel() >= ROWS * x.shape[-1]
        and not torch.is_autocast_enabled("cpu")
    )
