"""Dropout of models on a device, whose masks are functions of numbers and not of a stream (`kernels`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from rayfed.devices import counted, counted_seeds, counts_before
from rayfed.fast import kernels  # noqa: F401  # registers torch.ops.rayfed
from rayfed.models.backbone import Backbone


@dataclass(frozen=True)
class Draw:
    """Everything that decides a mask, apart from the place of an element.

    Attributes:
        seeds: Seed of the call of each client, int64, shape (K,), on the device; the rows of a tensor belong
            to the clients in this order, equally many to each.
        layer: Number of the layer.
        call: How often the layer drew before in these calls.
        p: Probability with which an element is dropped.
        counts: Added to `call` for each client, int64, shape (K,), on the device; None: nothing.
    """

    seeds: Tensor
    layer: int
    call: int
    p: float
    counts: Tensor | None = None

    @property
    def parts(self) -> tuple[Tensor, int, int, float, Tensor | None]:
        """The arguments of the operations."""
        return self.seeds, self.layer, self.call, self.p, self.counts


class Dropped(torch.autograd.Function):
    """Dropout with the mask of a draw, which the backward pass makes again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, draw: Draw) -> Tensor:
        ctx.draw = draw
        return cast(Tensor, torch.ops.rayfed.dropout(x, *draw.parts))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Dropped.apply(grad, ctx.draw), None


class CountedDropout(nn.Dropout):
    """Dropout on a device: by the numbers of the clients whose rows it gets.

    Outside of a client's call it draws from the stream of the device, as torch does.

    Attributes:
        number: Number of the layer among those of its model.
    """

    number: int

    def draws(self, x: Tensor) -> list[Draw]:
        """One draw for all rows, or one for the rows of each client where clients drew unequally often.

        Empty where nothing is dropped, or torch has to draw.

        Args:
            x: The input, which is counted as one more draw.

        Raises:
            NotImplementedError: Its rows are not those of the clients.
        """
        clients = counted()
        if not clients or not self.training or self.p == 0 or x.ndim < 2:
            return []
        if len(x) % len(clients):
            raise NotImplementedError("dropout cannot tell which rows belong to which client")
        calls = [client.next(self.number) for client in clients]
        seeds = counted_seeds(x.device)
        if len(set(calls)) == 1:
            return [Draw(seeds, self.number, calls[0], self.p, counts_before(self.number))]
        each = zip(seeds.split(1), calls, strict=True)
        return [Draw(seed, self.number, call, self.p) for seed, call in each]

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements.

        Args:
            x: Shape (K m, ..., d).
        """
        return self.with_draws(x, self.draws(x))

    def with_draws(self, x: Tensor, draws: Sequence[Draw]) -> Tensor:
        """As `forward`, with what `draws` returned."""
        if not draws:
            return super().forward(x)
        if len(draws) == 1:
            return cast(Tensor, Dropped.apply(x, draws[0]))
        parts = zip(x.chunk(len(draws)), draws, strict=True)
        return torch.cat([cast(Tensor, Dropped.apply(*part)) for part in parts])


def drop(layer: nn.Module, x: Tensor, apart: bool) -> tuple[Tensor, Draw | None]:
    """The output of a dropout layer, or x itself and the draw, with which the caller drops.

    Args:
        layer: A dropout layer, or the identity.
        apart: The caller cannot drop itself.
    """
    if apart or not isinstance(layer, CountedDropout):
        return layer(x), None
    draws = layer.draws(x)
    if len(draws) == 1:
        return x, draws[0]
    return layer.with_draws(x, draws), None


def use_counted_dropout(model: Backbone, checkpointing: bool) -> None:
    """Let dropout layers of a model on a device draw by number.

    Those that are computed a second time by a library's own checkpointing keep torch's dropout, whose stream
    the library sets back.

    Args:
        checkpointing: Whether activations are computed again in the backward pass.
    """
    kept = set()
    if checkpointing:
        parts = [model.text] if model.num_blocks else [model.text, model.net]
        kept = {module for part in parts if part is not None for module in part.modules()}
    layers = [module for module in model.modules() if type(module) is nn.Dropout and module not in kept]
    for number, layer in enumerate(layers):
        layer.__class__ = CountedDropout
        cast(CountedDropout, layer).number = number
