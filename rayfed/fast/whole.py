"""Networks of which everything trains, for several clients at once: products and convolutions by client.

Such clients have no trunk in common: every layer has values for each of them. The rows of a joint pass are
in another order here than in `rayfed.fast.stacked`: row j of every client, then row j + 1. So K m images
(K m, C, H, W) are m images of K C channels without a copy, and a convolution or a GroupNorm of K clients is
one operation with K times as many groups. A layer that looks at each row alone computes these rows as others.

Letters in shapes: K clients, m rows of a client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.fast.stacked import Stacked, dropouts
from rayfed.models.backbone import Backbone


def by_row(rows: Tensor, clients: int) -> Tensor:
    """Rows of K clients, one client after the other, as the layers here want them; shape (K m, ...)."""
    return rows.unflatten(0, (clients, -1)).transpose(0, 1).flatten(0, 1)


def by_client(rows: Tensor, clients: int) -> Tensor:
    """Rows as the layers here return them, one client after the other; shape (K m, ...)."""
    return rows.unflatten(0, (-1, clients)).transpose(0, 1).flatten(0, 1)


def run_whole(network: Callable[..., Any], x: Tensor, clients: int, **options: Any) -> Any:
    """The output of a network whose tensors are `WholeStack`s.

    Args:
        network: Maps rows to a tensor, or to a list or a tuple of tensors.
        x: Rows of all clients, one client after the other, shape (K m, ...).
        clients: Number K of clients.
        **options: Given to the network.

    Returns:
        Its output, in the order of x.
    """
    output = network(by_row(x, clients), **options)
    if isinstance(output, Tensor):
        return by_client(output, clients)
    return type(output)([by_client(each, clients) for each in output])


@contextmanager
def dropping_by_client(model: Backbone, clients: int) -> Iterator[None]:
    """Within it dropout layers, which know the rows of clients one after the other, get them so."""
    layers = list(dropouts(model)) if model.training and clients > 1 else []
    before = {layer: vars(layer).get("forward") for layer in layers}
    for layer in layers:
        vars(layer)["forward"] = partial(_in_order, layer.forward, clients)
    try:
        yield
    finally:
        for layer, own in before.items():
            if own is None:
                del vars(layer)["forward"]
            else:
                vars(layer)["forward"] = own


def _in_order(forward: Callable[[Tensor], Tensor], clients: int, x: Tensor) -> Tensor:
    return by_row(forward(by_client(x, clients)), clients)


class WholeStack(Stacked):
    """Values of one tensor for K clients whose rows are in the order of this module."""

    def expand(self, rows: int, *_: int) -> Tensor:
        """The value of its client for each of K m rows, shape (K m, ...), or its only row if it has one."""
        own = self.value.flatten(0, 1) if self.dim() > 1 and self.shape[0] == 1 else self.value
        return own.expand(rows // self.clients, *own.shape).flatten(0, 1)

    def with_rows(self, function: Callable[[Tensor, Tensor], Tensor], rows: Tensor) -> Tensor:
        """A function of each row and the tensor of its client, which is broadcast to the row.

        Args:
            function: Computes each element alone.
            rows: Shape (K m, ...).
        """
        shape = self.shape[1:] if self.dim() == rows.ndim and self.shape[0] == 1 else self.shape
        if len(shape) >= rows.ndim:
            raise NotImplementedError("a tensor with its own rows cannot be used for several clients at once")
        own = self.value.reshape(self.clients, *[1] * (rows.ndim - 1 - len(shape)), *shape)
        return function(rows.unflatten(0, (-1, self.clients)), own).flatten(0, 1)

    def __add__(self, other: Tensor) -> Tensor:
        return self.with_rows(torch.add, other)

    __radd__ = __add__

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, Tensor):
            return self.with_rows(torch.mul, other)
        return type(self)(self.value * other)

    __rmul__ = __mul__


def _each(value: Any, clients: int) -> Tensor | None:
    """The values of K clients, shape (K, ...), of a stack or of a tensor that all have; None: of nothing."""
    if isinstance(value, Stacked):
        return value.value
    return None if value is None else value.expand(clients, *value.shape)


def _of_all(weight: Any, bias: Any) -> tuple[int, Any, Any]:
    """Number K of clients, and their weights and biases, of which at least one is a stack."""
    clients = (weight if isinstance(weight, Stacked) else bias).clients
    return clients, _each(weight, clients), _each(bias, clients)


def _linear(x: Tensor, weight: Any, bias: Any = None) -> Tensor:
    """F.linear of rows (K m, ..., d_in).

    The weights come first in the products, so that their gradients are laid out as they are.
    """
    clients, weights, biases = _of_all(weight, bias)
    rows = x.unflatten(0, (-1, clients)).transpose(0, 1)
    flat = rows.reshape(clients, -1, x.shape[-1]).mT
    out = torch.bmm(weights, flat) if biases is None else torch.baddbmm(biases[:, :, None], weights, flat)
    by_rows = out.mT.unflatten(1, rows.shape[1:-1]).transpose(0, 1).flatten(0, 1)
    return by_rows.contiguous()  # for one client it is a view in another order, in which dropout would draw


def _convolution(
    function: Callable[..., Tensor],
    x: Tensor,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """A convolution of maps (K m, d_in, ...), as of F.conv2d or F.conv1d."""
    clients, weights, biases = _of_all(weight, bias)
    flat = None if biases is None else biases.flatten()
    form = (stride, padding, dilation, clients * groups)
    out = function(_channels(x, clients), weights.flatten(0, 1), flat, *form)
    return out.unflatten(1, (clients, -1)).flatten(0, 1)


def _group_norm(x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    """F.group_norm of maps (K m, d, ...)."""
    clients, weights, biases = _of_all(weight, bias)
    scale, shift = (None if each is None else each.flatten() for each in (weights, biases))
    out = F.group_norm(_channels(x, clients), clients * groups, scale, shift, eps)
    return out.unflatten(1, (clients, -1)).flatten(0, 1)


def _channels(x: Tensor, clients: int) -> Tensor:
    """Maps (K m, d, ...) as m maps of K d channels."""
    return x.unflatten(0, (-1, clients)).flatten(1, 2)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    """F.layer_norm of rows (K m, ...) over the last dimensions, which have this shape."""
    if x.ndim == 2:  # one operation: a GroupNorm of m rows, whose groups are the clients
        return _group_norm(x, 1, weight, bias, eps)
    clients, *both = _of_all(weight, bias)
    normed = F.layer_norm(x, shape, None, None, eps).unflatten(0, (-1, clients))
    middle = [1] * (x.ndim - 1 - len(shape))
    weights, biases = (None if each is None else each.reshape(clients, *middle, *shape) for each in both)
    if weights is None:
        return (normed + biases).flatten(0, 1)
    out = normed * weights if biases is None else torch.addcmul(biases, normed, weights)
    return out.flatten(0, 1)


WholeStack.functions = {
    F.linear: _linear,
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    torch.conv1d: partial(_convolution, torch.conv1d),
    torch.conv2d: partial(_convolution, torch.conv2d),
    Tensor.mul: lambda x, own: own.with_rows(torch.mul, x),
    Tensor.add: lambda x, own: own.with_rows(torch.add, x),
}
