"""A trained tensor with one value for each client of a joint forward pass, and the layers that can have one.

The rows of K clients run through one network: client k owns rows k m to (k + 1) m of every batch, and layers
that train apply each client's own values to its rows. Letters in shapes: K clients, m rows of a client.

Where the texts of all clients lie one after the other in one row (`rayfed.fast.packed_texts`), a tensor has
the shape (1, T, ...) instead, and client k owns as many of the T tokens as `in_one_row` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.models.backbone import Backbone
from rayfed.models.named_tensors import NamedTensor

_SIZES: ContextVar[Sequence[int]] = ContextVar("sizes", default=())
_TOKENS: ContextVar[Sequence[int]] = ContextVar("tokens", default=())


@contextmanager
def joint_pass(sizes: Sequence[int]) -> Iterator[None]:
    """Within it a network computes rows of several clients. Args: sizes: rows of each client."""
    token = _SIZES.set(sizes)
    try:
        yield
    finally:
        _SIZES.reset(token)


def rows_of_clients() -> Sequence[int]:
    """Rows of each client of the joint pass that is computed; empty: none is."""
    return _SIZES.get()


@contextmanager
def in_one_row(tokens: Sequence[int]) -> Iterator[None]:
    """Within it the texts of clients lie in one row. Args: tokens: those of each client; empty: of one."""
    token = _TOKENS.set(tokens)
    try:
        yield
    finally:
        _TOKENS.reset(token)


def tokens_of_clients() -> Sequence[int]:
    """Tokens of each client, where those of all lie in one row; empty: they do not."""
    return _TOKENS.get()


class Stacked:
    """Values of one tensor for K clients, in place of a parameter of a module.

    It is no tensor: the functions of torch that receive it call `__torch_function__`, and only those that
    know how rows belong to clients are implemented.

    Attributes:
        value: The values, shape (K, ...).
        requires_grad: True: it stands for a tensor that is trained, whether or not this pass has gradients.
        functions: Functions that take values by client, and what computes them.
    """

    requires_grad = True
    functions: ClassVar[Mapping[Callable[..., Any], Callable[..., Any]]] = {}

    def __init__(self, value: Tensor) -> None:
        self.value = value

    @property
    def clients(self) -> int:
        """Number K of clients."""
        return len(self.value)

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor of one client."""
        return self.value.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @property
    def device(self) -> torch.device:
        return self.value.device

    def __len__(self) -> int:
        return int(self.shape[0])

    def to(self, *args: Any, **kwargs: Any) -> Stacked:
        """As Tensor.to."""
        return type(self)(self.value.to(*args, **kwargs))

    def dim(self) -> int:
        """Number of dimensions of the tensor of one client."""
        return len(self.shape)

    def expand(self, rows: int, *_: int) -> Tensor:
        """The value of its client for each of K m rows, shape (K m, ...)."""
        each = rows // self.clients
        return self.value[:, None].expand(-1, each, *self.shape).flatten(0, 1)

    def flatten(self) -> Stacked:
        """As Tensor.flatten, for the tensor of each client."""
        return type(self)(self.value.flatten(1))

    def __rmul__(self, factor: float) -> Stacked:
        """The tensor of each client times a number."""
        return Stacked(factor * self.value)

    def __add__(self, other: Tensor) -> Tensor:
        """The sum for each row; `other` has shape (K m, ...)."""
        return self.expand(len(other)) + other

    def along(self, rows: Tensor) -> Tensor:
        """The values in a shape that is broadcast to each client's rows, shape (K m, ...)."""
        own = self.expand(len(rows))
        return own.reshape(len(rows), *[1] * (rows.ndim - own.ndim), *self.shape)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in cls.functions:
            name = getattr(func, "__name__", str(func))
            raise NotImplementedError(f"{name} cannot be computed for several clients at once")
        return cls.functions[func](*args, **(kwargs or {}))


def _linear(x: Tensor, weight: Any, bias: Any = None) -> Tensor:
    """F.linear of rows (K m, ..., d_in) with the weight, the bias or both of each client."""
    if isinstance(weight, Tensor):
        return _add(F.linear(x, weight), bias)
    if tokens_of_clients():
        return _add(_by_client(F.linear, x, weight), bias)
    rows = x.reshape(weight.clients, -1, x.shape[-1])
    if isinstance(bias, Stacked):
        out = torch.baddbmm(bias.value[:, None], rows, weight.value.mT)
    else:
        out = torch.bmm(rows, weight.value.mT)
        out = out if bias is None else out + bias
    return out.view(*x.shape[:-1], out.shape[-1])


def _layer_norm(x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    """F.layer_norm over the last dimension with the weight, the bias or both of each client."""
    if isinstance(weight, Stacked) and tokens_of_clients():
        return _add(_times(F.layer_norm(x, shape, None, None, eps), weight), bias)
    if isinstance(weight, Stacked):
        rows = F.layer_norm(x, shape, None, None, eps).reshape(weight.clients, -1, x.shape[-1])
        return _add((rows * weight.value[:, None]).view(x.shape), bias)
    return _add(F.layer_norm(x, shape, weight, None, eps), bias)


def _by_client(function: Callable[[Tensor, Tensor], Tensor], x: Tensor, values: Stacked) -> Tensor:
    """A function of the tokens of each client, in a row (1, T, ...), and of its tensor, in a row again."""
    parts = zip(x.split([*tokens_of_clients()], 1), values.value.unbind(0), strict=True)
    return torch.cat([function(part, own) for part, own in parts], 1)


def _add(y: Tensor, bias: Any) -> Tensor:
    """Rows (K m, ..., d) plus the vector of d numbers of each client, in the type of the rows."""
    if not isinstance(bias, Stacked):
        return y if bias is None else y + bias.to(y.dtype)
    if tokens_of_clients():
        return _plus(y, bias.to(y.dtype))
    rows = y.reshape(bias.clients, -1, y.shape[-1])
    return (rows + bias.value.to(y.dtype)[:, None]).view(y.shape)


def _conv2d(x: Tensor, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    """F.conv2d of images (K m, d_in, H, W) with the weight, the bias or both of each client."""
    if isinstance(weight, Tensor):
        maps = torch.conv2d(x, weight, None, *args, **kwargs).unflatten(0, (bias.clients, -1))
        return (maps + bias.value.to(maps.dtype)[:, None, :, None, None]).flatten(0, 1)
    kernels = weight.value.unbind(0)
    biases = bias.value.unbind(0) if isinstance(bias, Stacked) else [bias] * len(kernels)
    parts = x.unflatten(0, (len(kernels), -1)).unbind(0)
    each = zip(parts, kernels, biases, strict=True)
    return torch.cat([torch.conv2d(part, w, b, *args, **kwargs) for part, w, b in each])


def _times(x: Tensor, scale: Stacked) -> Tensor:
    """Rows (K m, ...) times the tensor of each client."""
    if tokens_of_clients():
        return _by_client(torch.mul, x, scale)
    return x * scale.along(x)


def _plus(x: Tensor, shift: Stacked) -> Tensor:
    """Rows (K m, ...) plus the tensor of each client."""
    if tokens_of_clients():
        return _by_client(torch.add, x, shift)
    return x + shift.along(x)


def _normalize(
    tensor: Stacked, p: float = 2.0, dim: int = -1, eps: float = 1e-12, out: None = None
) -> Stacked:
    """F.normalize of the tensor of each client along its last dimension."""
    if dim != -1:
        raise NotImplementedError(f"normalize with dim={dim} cannot be computed for several clients at once")
    return Stacked(F.normalize(tensor.value, p, -1, eps, out))


Stacked.functions = {
    F.linear: _linear,
    F.normalize: _normalize,
    F.layer_norm: _layer_norm,
    torch.conv2d: _conv2d,
    Tensor.mul: _times,
    Tensor.add: _plus,
}


def stackable(model: Backbone) -> dict[str, NamedTensor]:
    """The tensors that differ by client in a joint pass: all trained ones outside the text side, by name."""
    text = set() if model.text is None else set(model.text.modules())
    return {n: t for n, t in model.tensors().items() if t.is_trained and t.module not in text}


def dropouts(model: Backbone) -> Iterator[nn.Dropout]:
    """Dropout layers that are active in the present mode."""
    return (m for m in model.modules() if isinstance(m, nn.Dropout) and m.p > 0 and m.training)
