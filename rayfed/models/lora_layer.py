"""Layers with a LoRA adapter: the start values, outputs and names of tensors of PEFT.

PEFT itself imports transformers, which takes a process four times as long as everything else before its first
batch. Letters in shapes: r rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from rayfed.errors import ConfigError
from rayfed.models.backbone import Backbone
from rayfed.models.named_tensors import RESIDUAL_LEAF

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
ADAPTED = (nn.Linear, *CONVOLUTIONS, nn.Embedding)
"""Types of layers that can be adapted."""

M = TypeVar("M", bound=nn.Module)

ADAPTER = "default"
"""PEFT's name of the only adapter of a layer."""

EXACT = ("cpu", "meta")
"""Devices where a layer adds as PEFT does, to the bit; on the meta device its operations are counted."""


_twice: ContextVar[bool] = ContextVar("twice", default=False)
"""Whether passes need second derivatives."""


def is_twice_differentiable() -> bool:
    """Whether passes need second derivatives now."""
    return _twice.get()


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Compute LoRA, attention and LSTMs by operations with second derivatives; the fused ones have none."""
    cudnn = torch.backends.cudnn
    before = cudnn.enabled
    cudnn.enabled = False
    token = _twice.set(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        _twice.reset(token)
        cudnn.enabled = before


class AdaptedLayer(nn.Module):
    """A layer and a product of two factors that is added to it.

    Attributes:
        base_layer: The layer.
        r: Rank of the factors, by the name of the adapter.
        scaling: alpha / rank, by the name of the adapter.
    """

    def __init__(self, base_layer: nn.Module, rank: int, alpha: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.r = {ADAPTER: rank}
        self.scaling = {ADAPTER: alpha / rank}

    @property
    def weight(self) -> Tensor:
        """The weight of the layer, for those who read it, such as torch's encoder layers."""
        return self.base_layer.weight  # type: ignore[return-value]  # every adapted layer has one

    @property
    def bias(self) -> Tensor | None:
        """The bias of the layer, which an embedding does not have."""
        return getattr(self.base_layer, "bias", None)

    def product(self) -> Tensor:
        """Product of the factors, of the shape of the weight, without the scale.

        Raises:
            ConfigError: The weight could not hold it.
        """
        raise NotImplementedError

    def _place(self, factors: M) -> M:
        """Move factors to the device and the type of the layer."""
        return factors.to(self.weight.device, self.weight.dtype)


class _Multiplied(AdaptedLayer):
    """A layer whose factors are separate layers, so that its input is multiplied with A, then with B."""

    def __init__(
        self, base_layer: nn.Module, rank: int, alpha: float, dropout: float, a: nn.Module, b: nn.Module
    ) -> None:
        super().__init__(base_layer, rank, alpha)
        self.lora_dropout = nn.ModuleDict({ADAPTER: nn.Dropout(dropout) if dropout else nn.Identity()})
        nn.init.kaiming_uniform_(a.weight, a=math.sqrt(5))  # type: ignore[arg-type]
        nn.init.zeros_(b.weight)  # type: ignore[arg-type]
        self.lora_A = nn.ModuleDict({ADAPTER: self._place(a)})
        self.lora_B = nn.ModuleDict({ADAPTER: self._place(b)})

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Output of the layer. Args: x: its input; args, kwargs: other arguments of the layer."""
        result: Tensor = self.base_layer(x, *args, **kwargs)
        first, second = self.lora_A[ADAPTER], self.lora_B[ADAPTER]
        low = self.lora_dropout[ADAPTER](x.to(first.weight.dtype))  # type: ignore[arg-type]
        return (result + second(first(low)) * self.scaling[ADAPTER]).to(result.dtype)


class AdaptedLinear(_Multiplied):
    """A linear layer whose only adapter is a product of two factors, y = W x + b + scale B A x.

    The values in float32 on a CPU are those of PEFT to the bit: what is left out is its choice among adapters
    in every pass, and a product with a scale of 1. In mixed precision and on other devices the products are
    added in place, and in mixed precision the input is rounded once, for W and A; PEFT makes float32 of it
    first.
    """

    def __init__(self, base_layer: nn.Linear, rank: int, alpha: float, dropout: float) -> None:
        a = nn.Linear(base_layer.in_features, rank, bias=False)
        b = nn.Linear(rank, base_layer.out_features, bias=False)
        super().__init__(base_layer, rank, alpha, dropout, a, b)
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Output of the layer. Args: x: rows (B, ..., d_in); args, kwargs: other arguments of the layer."""
        mixed = is_mixed(x)
        if args or kwargs or not self.is_plain_for(x, mixed):
            return super().forward(x, *args, **kwargs)
        if mixed:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return self.sum_of_products(x, self.lora_dropout[ADAPTER](x), mixed)

    def is_plain_for(self, x: Tensor, mixed: bool) -> bool:
        """Whether nothing stands between the factors, and they are multiplied with this input as it is."""
        a: Any = self.lora_A[ADAPTER].weight
        return isinstance(self.lora_B[ADAPTER], nn.Linear) and (x.dtype == a.dtype or mixed)

    def sum_of_products(self, x: Tensor, low: Tensor, mixed: bool) -> Tensor:
        """W x + b + scale B A x'.

        Args:
            x: Input of the layer, shape (B, ..., d_in).
            low: Input x' of the factors, of the same shape: x after dropout.
            mixed: As `is_mixed` says of the input.
        """
        first, second = self.lora_A[ADAPTER], self.lora_B[ADAPTER]
        layer: Any = self.base_layer
        scale = self.scaling[ADAPTER]
        if mixed or x.device.type not in EXACT:
            rows = first(low.reshape(-1, low.shape[-1]))
            b: Any = second.weight
            # No view until the sum is made: a change in place of a view is copied in the backward pass.
            sums = layer(x.reshape(-1, x.shape[-1])).addmm_(rows, b.to(rows.dtype).mT, alpha=scale)
            result: Tensor = sums.view(*x.shape[:-1], sums.shape[-1])
            return result
        y: Tensor = layer(x)
        added: Tensor = second(first(low))
        return y + (added if scale == 1 else added * scale)

    def product(self) -> Tensor:
        """B A, or B C A with a core, and R where there is one; shape (d_out, d_in)."""
        first, second = self.lora_A[ADAPTER], self.lora_B[ADAPTER]
        value: Tensor = second(first(torch.eye(self.in_features, dtype=self.weight.dtype))).mT
        return value + getattr(self, RESIDUAL_LEAF, 0)


def is_mixed(x: Tensor) -> bool:
    """Whether products with a tensor are computed in mixed precision now, which no meta device has."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


class AdaptedConvolution(_Multiplied):
    """A convolution to whose output B * (A * x) is added: A as large as its kernel, B of size 1.

    A has rank r as its number of channels. Unlike PEFT, A is as dilated as the layer.
    """

    def __init__(self, base_layer: Any, rank: int, alpha: float, dropout: float) -> None:
        kind, own = type(base_layer), base_layer
        one = (1,) * len(own.kernel_size)
        place = {"dilation": own.dilation, "bias": False}
        a = kind(own.in_channels, rank, own.kernel_size, own.stride, own.padding, **place)
        b = kind(rank, own.out_channels, one, one, groups=own.groups, bias=False)
        super().__init__(base_layer, rank, alpha, dropout, a, b)

    def product(self) -> Tensor:
        """Kernel of B * (A * x), shape (out, in, ...)."""
        layer: Any = self.base_layer
        if layer.groups > 1 or layer.padding_mode != "zeros":
            raise ConfigError(
                f"merged: a convolution with groups={layer.groups} and padding_mode={layer.padding_mode} "
                f"cannot hold its adapter, which sees all channels, with zeros around; leave out merged=True"
            )
        a: Any = self.lora_A[ADAPTER].weight
        b: Any = self.lora_B[ADAPTER].weight
        return torch.einsum("or,r...->o...", b.flatten(1), a)


class AdaptedEmbedding(AdaptedLayer):
    """An embedding to whose output scale B A[:, i] is added; A has shape (r, N), B (D, r).

    A starts as zero and B with random values, as in PEFT, which drops nothing out here.
    """

    def __init__(self, base_layer: nn.Embedding, rank: int, alpha: float, dropout: float) -> None:
        super().__init__(base_layer, rank, alpha)
        a = torch.randn(rank, base_layer.num_embeddings)
        b = nn.init.normal_(torch.randn(base_layer.embedding_dim, rank))  # PEFT draws twice, too
        self.lora_embedding_A = self._place(nn.ParameterDict({ADAPTER: nn.Parameter(a.zero_())}))
        self.lora_embedding_B = self._place(nn.ParameterDict({ADAPTER: nn.Parameter(b)}))

    def product(self) -> Tensor:
        """(B A)^T, shape (N, D)."""
        return (self.lora_embedding_B[ADAPTER] @ self.lora_embedding_A[ADAPTER]).T

    def forward(self, x: Tensor) -> Tensor:
        """Output of the layer. Args: x: numbers of rows, shape (B, ...)."""
        layer: Any = self.base_layer
        result: Tensor = layer(x)
        a, b = self.lora_embedding_A[ADAPTER], self.lora_embedding_B[ADAPTER]
        rest = layer.max_norm, layer.norm_type, layer.scale_grad_by_freq, layer.sparse
        added = F.embedding(x, a.T, layer.padding_idx, *rest) @ b.T * self.scaling[ADAPTER]
        if (factor := getattr(layer, "embed_scale", None)) is not None:  # some layers scale their rows
            added = added * factor
        return (result + added).to(result.dtype)


def adapt(net: nn.Module, pattern: str, rank: int, alpha: float, dropout: float) -> None:
    """Put an adapter into every layer whose whole name a regular expression matches.

    Args:
        net: The network, whose layers of the types `ADAPTED` are replaced.
        pattern: The regular expression.
        rank: Rank of the factors.
        alpha: The products are multiplied by alpha / rank.
        dropout: Dropout probability of the input of the factors.
    """
    layers = {name: module for name, module in net.named_modules() if isinstance(module, ADAPTED)}
    for name, layer in layers.items():
        if re.fullmatch(pattern, name):
            _check_groups(name, layer, rank)
            kind: Any = next(adapted for known, adapted in _KINDS if isinstance(layer, known))
            with layer.weight.device if layer.weight.is_meta else torch.device("cpu"):
                net.set_submodule(name, kind(layer, rank, alpha, dropout))


def _check_groups(name: str, layer: Any, rank: int) -> None:
    """Raise ConfigError for a convolution in groups, each of which needs as many of the `rank` channels."""
    groups = getattr(layer, "groups", 1)
    if rank % groups:
        raise ConfigError(
            f"tuning.rank: {rank} is no multiple of the {groups} groups of the convolution "
            f"{name.removeprefix('body.')!r}; set a multiple of {groups}, or name other layers in "
            "tuning.targets"
        )


def merge(net: nn.Module) -> int:
    """Add the product of every adapter to the weight of its layer, which takes the adapter's place again.

    Args:
        net: The network, which is changed; values that it shares with others are not.

    Returns:
        Number of layers that had an adapter.

    Raises:
        ConfigError: The weight of a layer cannot hold the product.
    """
    adapted = {name: layer for name, layer in net.named_modules() if isinstance(layer, AdaptedLayer)}
    for name, layer in adapted.items():
        base: Any = layer.base_layer
        with torch.no_grad():
            weight = base.weight + layer.product().to(base.weight.dtype) * layer.scaling[ADAPTER]
        base.weight = nn.Parameter(weight, requires_grad=base.weight.requires_grad)
        net.set_submodule(name, base)
    return len(adapted)


FACTOR = re.compile(r"\.lora_[AB]\.")
"""In the names of layers that are factors of an adapter."""


def frozen_linears(model: Backbone) -> dict[str, nn.Linear]:
    """The frozen linear layers of the network by name, without factors that a tuning scheme freezes."""
    return {
        name: module
        for name, module in model.net.named_modules()
        if isinstance(module, nn.Linear) and is_frozen(module) and not FACTOR.search(name)
    }


def quantize(model: Backbone, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Put other layers in the place of the frozen linear layers of the network; adapters stay as they are.

    Args:
        model: The tuned model with its values, which is changed.
        make: The layer that replaces one.
    """
    for name, layer in frozen_linears(model).items():
        model.net.set_submodule(name, make(layer))
    model.refresh()


def four_bits(layer: nn.Linear) -> nn.Module:
    """A layer whose weight is stored as NF4 as soon as it is moved to a GPU, with products in bfloat16."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    shape = layer.in_features, layer.out_features
    made: nn.Module = Linear4bit(*shape, layer.bias is not None, torch.bfloat16, quant_type="nf4")
    made.weight = Params4bit(layer.weight.detach(), requires_grad=False, quant_type="nf4")
    made.bias = layer.bias
    return made


_KINDS = (
    (nn.Embedding, AdaptedEmbedding),
    (nn.Linear, AdaptedLinear),
    (CONVOLUTIONS, AdaptedConvolution),
)
"""Layers and their adapted form."""


def is_frozen(layer: nn.Module) -> bool:
    """Whether a layer is torch's own linear layer, and neither its weight nor its bias is trained."""
    return type(layer) is nn.Linear and not any(p.requires_grad for p in layer.parameters())
