"""A pass that was computed for the rows of several clients, and its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rayfed.federation.turns import Streams
from rayfed.models.backbone import Backbone
from rayfed.models.named_tensors import NamedTensor
from rayfed.models.stacked import dropouts


@dataclass(frozen=True)
class Rows:
    """How the rows of a joint batch belong to clients.

    Attributes:
        members: Numbers of the clients, in the order of their rows.
        sizes: Rows of each client. Every client has room for as many as the largest one; its first row is
            repeated in the rest, and no result of these rows is used.
    """

    members: Sequence[int]
    sizes: Sequence[int]

    @property
    def room(self) -> int:
        """Number m of rows that every client has room for."""
        return max(self.sizes)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The rows of all clients, shape (K m, ...)."""
        if len(parts) == 1:
            return parts[0]
        filled = []
        for part in parts:
            filled.append(part)
            if short := self.room - len(part):
                filled.append(part[:1].expand(short, *part.shape[1:]))
        return torch.cat(filled)

    def own(self, i: int, joint: Tensor) -> Tensor:
        """Rows of the client at place i."""
        start = i * self.room
        return joint[start : start + self.sizes[i]]


class Joint:
    """A pass that was computed for several clients.

    Attributes:
        names: Tensors that get gradients, by global name.
    """

    def __init__(self, rows: Rows, output: Any, leaves: Mapping[str, Tensor], x: Tensor | None) -> None:
        self._rows = rows
        self._output = output
        self._flat = [output] if isinstance(output, Tensor) else list(output)
        self._x = x
        self._leaves = leaves
        self._waiting = set(rows.members)
        self.names = tuple(leaves)

    def shaped(self, flat: Sequence[Tensor]) -> Any:
        """Outputs in the form in which the model returned them: a tensor, a list or a tuple."""
        return flat[0] if isinstance(self._output, Tensor) else type(self._output)(flat)

    def parts(self, i: int) -> list[Tensor]:
        """Outputs for the rows of the client at place i, without gradients."""
        return [self._rows.own(i, out.detach()) for out in self._flat]

    def answers(self) -> dict[int, Any]:
        """The answer for each client: its rows, or what connects them to the gradients."""
        members = enumerate(self._rows.members)
        if any(out.requires_grad for out in self._flat):
            return {k: Share(self, i) for i, k in members}
        return {k: self.shaped(self.parts(i)) for i, k in members}

    def backward(self, grads: Mapping[int, Sequence[Tensor | None]]) -> dict[int, list[Tensor | None]]:
        """One backward pass for the clients that asked for it.

        Args:
            grads: Gradients of each output for the rows of a client, by number of the client.

        Returns:
            For each client the gradients of its rows (None unless they require gradients) and of its tensors.
        """
        self._waiting -= grads.keys()
        outputs = []
        incoming = []
        for j, out in enumerate(self._flat):
            if out.requires_grad and any(given[j] is not None for given in grads.values()):
                outputs.append(out)
                incoming.append(self._incoming(j, out, grads))
        inputs = [*([] if self._x is None else [self._x]), *self._leaves.values()]
        found: Sequence[Tensor | None] = [None] * len(inputs)
        if outputs:
            keep = bool(self._waiting)
            found = torch.autograd.grad(outputs, inputs, incoming, retain_graph=keep, allow_unused=True)
        of_x = None if self._x is None else found[0]
        each = [None if g is None else g.unbind(0) for g in found[len(inputs) - len(self._leaves) :]]
        answers: dict[int, list[Tensor | None]] = {}
        for i, k in enumerate(self._rows.members):
            if k in grads:
                mine = None if of_x is None else self._rows.own(i, of_x)
                answers[k] = [mine, *(None if g is None else g[i] for g in each)]
        return answers

    def _incoming(self, j: int, out: Tensor, grads: Mapping[int, Sequence[Tensor | None]]) -> Tensor:
        parts = [grads[k][j] if k in grads else None for k in self._rows.members]
        given = [part for part in parts if part is not None]
        if len(given) == len(parts) and min(self._rows.sizes) == self._rows.room:
            return torch.cat(given)
        whole = torch.zeros_like(out)
        for i, part in enumerate(parts):
            if part is not None:
                self._rows.own(i, whole).copy_(part)
        return whole


@dataclass(frozen=True, eq=False)
class Share:
    """The part of one client in a joint pass.

    Attributes:
        joint: The pass.
        place: Place of the client in it.
    """

    joint: Joint
    place: int


@dataclass(frozen=True, eq=False)
class Backward:
    """A backward pass that a client asks for.

    Attributes:
        joint: The pass whose outputs have these gradients.
        grads: Gradient of each output for the client's rows; None: the output was not used.
    """

    joint: Joint
    grads: Sequence[Tensor | None]


class JointPass(torch.autograd.Function):
    """One client's rows of a joint pass, as a function of its rows and its tensors.

    The backward pass waits for the other clients; second derivatives do not exist.
    """

    @staticmethod
    def forward(ctx: Any, share: Share, ask: Callable[[Any], Any], x: Tensor, *leaves: Tensor) -> Any:
        ctx.share = share
        ctx.ask = ask
        ctx.set_materialize_grads(False)
        return tuple(share.joint.parts(share.place))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        found = ctx.ask(Backward(ctx.share.joint, grads))
        given = (None, None, *found)
        found.clear()  # of tensors that nobody else refers to, autograd makes no copies
        return given


@contextmanager
def bound(places: Mapping[str, NamedTensor], values: Mapping[str, Any]) -> Iterator[None]:
    """Put values into the modules that own these tensors, and the former ones back afterwards."""
    before = []
    for name, entry in places.items():
        held: Any = entry.module._buffers if entry.is_buffer else entry.module._parameters
        before.append((held, entry.leaf, held[entry.leaf]))
        held[entry.leaf] = values[name]
    try:
        yield
    finally:
        for held, leaf, value in before:
            held[leaf] = value


@contextmanager
def dropping(model: Backbone, rows: Rows, streams: Sequence[Streams]) -> Iterator[None]:
    """Let every dropout layer draw the rows of each client from its own random stream."""
    layers = list(dropouts(model)) if model.training else []
    for layer in layers:
        vars(layer)["forward"] = partial(_dropout, p=layer.p, rows=rows, streams=streams)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def _dropout(x: Tensor, p: float, rows: Rows, streams: Sequence[Streams]) -> Tensor:
    """Dropout that draws for a client what F.dropout would draw for its rows alone."""
    noise = []
    for i, k in enumerate(rows.members):
        part = rows.own(i, x.detach())
        noise.append(torch.empty_like(part).bernoulli_(1 - p, generator=streams[k].on(x.device)))
    return x * rows.join(noise).div_(1 - p)
