"""Plays a group of clients at once: one forward and one backward pass for the rows of all of them.

The code of every client runs as if it were alone. Where it asks its model for a pass, it waits until all
clients of the group ask for something; passes of the same kind are then computed together, with the values
of each client for its rows, and every client continues with its own rows of the result. Likewise, where it
calls `backward`, the gradients of all clients go through the shared network in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rayfed.federation.member import MemberModel, Pass
from rayfed.federation.turns import Streams, Turn
from rayfed.models.backbone import Backbone
from rayfed.models.named_tensors import NamedTensor
from rayfed.tuning.stacked import Stacked, dropouts, stackable
from rayfed.types import Params, Update


class MemberError(Exception):
    """The code of a client of a group failed; its error is the cause of this one."""


class Group:
    """Clients that share their passes.

    Attributes:
        models: The model of each client, to be used in its code only.
        streams: The random streams of each client.
    """

    def __init__(
        self,
        model: Backbone,
        values: Sequence[Params],
        active: Sequence[tuple[int, ...]],
        seeds: Sequence[int],
    ) -> None:
        """Make the models of the clients.

        Args:
            model: The model; it is changed during passes only.
            values: Values of all trained tensors of each client, by global name.
            active: Blocks that each client holds.
            seeds: Seed of the random streams of each client.
        """
        self._model = model
        self._places = stackable(model)
        self._stacks = {name: torch.stack([own[name] for own in values]) for name in values[0]}
        entries = model.tensors()
        self._turns: list[Turn[Update]] = []
        self.streams = [Streams(seed) for seed in seeds]
        self.models = [
            MemberModel(model, self._own(k, entries), active[k], partial(self._ask, k))
            for k in range(len(values))
        ]

    def _own(self, k: int, entries: Mapping[str, NamedTensor]) -> Params:
        """Trained tensors of client k, which are views of the stacks, so that a pass need not copy them."""
        return {
            name: stack[k] if entries[name].is_buffer else nn.Parameter(stack[k])
            for name, stack in self._stacks.items()
        }

    def run(self, tasks: Sequence[Callable[[], Update]]) -> list[Update]:
        """Run the code of every client to its end.

        Args:
            tasks: The code of each client.

        Raises:
            MemberError: The code of a client raised an error; that of the others was ended.
        """
        self._turns = [
            Turn(partial(_in_one_thread, task), own) for task, own in zip(tasks, self.streams, strict=True)
        ]
        try:
            for turn in self._turns:
                self._resume(turn)
            while waiting := [k for k, turn in enumerate(self._turns) if turn.request is not None]:
                answers = self._answers({k: self._turns[k].request for k in waiting})
                for k in waiting:
                    self._resume(self._turns[k], answers[k])
        finally:
            for turn in self._turns:
                turn.cancel()
            self._model.active = None if self._model.num_blocks else ()
            self._model.untuned = False
        return [turn.result for turn in self._turns if turn.result is not None]

    def _resume(self, turn: Turn[Update], answer: Any = None) -> None:
        turn.resume(answer)
        if turn.error is not None:
            raise MemberError from turn.error

    def _ask(self, k: int, request: Pass | Backward) -> Any:
        """What client k's model calls for a pass: wait for the joint one, and connect it to the gradients."""
        answer = self._turns[k].ask(request)
        if not isinstance(answer, Share):
            return answer
        own = self.models[k].own
        leaves = [own[name] for name in answer.joint.names]
        assert isinstance(request, Pass)
        outputs = _JointPass.apply(answer, partial(self._ask, k), request.x, *leaves)  # type: ignore[no-untyped-call]
        return answer.joint.shaped(outputs)

    def _answers(self, requests: Mapping[int, Pass | Backward]) -> dict[int, Any]:
        """Compute all requests, those of the same kind together; kinds in the order of their first client."""
        kinds: dict[Any, list[int]] = {}
        for k, request in requests.items():
            kinds.setdefault(request.key, []).append(k)
        answers: dict[int, Any] = {}
        for members in kinds.values():
            wanted = [requests[k] for k in members]
            if isinstance(wanted[0], Backward):
                answers |= wanted[0].joint.backward({k: requests[k].grads for k in members})  # type: ignore[union-attr]
            elif wanted[0].kind == "frozen_features":
                answers |= {k: self._alone(requests[k]) for k in members}  # type: ignore[arg-type]
            else:
                answers |= self._together(members, wanted)  # type: ignore[arg-type]
        return answers

    def _alone(self, request: Pass) -> Tensor:
        self._model.active = request.state[2]
        return self._model.frozen_features(request.x)

    def _together(self, members: Sequence[int], passes: Sequence[Pass]) -> dict[int, Any]:
        """One pass of the network for the rows of these clients."""
        training, gradients, active, untuned = passes[0].state
        model = self._model
        model.active = active
        model.untuned = untuned
        if model.training != training:
            model.train(training)
        rows = Rows(members, [len(p.x) for p in passes])
        held = {n: v for n, v in self._places.items() if v.block is None or v.block in active}
        leaves = {n: self._values(n, members, passes) for n in held}
        learned = [
            n for n, v in leaves.items() if gradients and isinstance(v, Stacked) and not held[n].is_buffer
        ]
        for name in learned:
            leaves[name].value.requires_grad_()
        x = rows.join([p.x.detach() for p in passes])
        if passes[0].x.requires_grad:
            x.requires_grad_()
        if passes[0].known is not None:
            known = rows.join([p.known for p in passes])  # type: ignore[misc]
            x = known if model.has_frozen_features else x
            model.remember_frozen_features(x, known)
        with ExitStack() as stack, torch.set_grad_enabled(gradients):
            stack.enter_context(_bound(held, leaves))
            stack.enter_context(_dropping(model, rows, self.streams))
            output = getattr(model, passes[0].kind)(x, **passes[0].options)
        joint = Joint(rows, output, {n: leaves[n].value for n in learned}, x if x.requires_grad else None)
        return joint.answers()

    def _values(self, name: str, members: Sequence[int], passes: Sequence[Pass]) -> Any:
        """The values of one tensor for these clients: their own, or those that they gave for this pass."""
        if name not in passes[0].values:
            stack = self._stacks[name]
            first, last = members[0], members[-1]
            whole = last - first + 1 == len(members)
            return Stacked(stack.detach()[first : last + 1] if whole else stack[list(members)])
        given = [p.values[name] for p in passes]
        device = self._stacks[name].device
        if all(value is given[0] for value in given):
            return given[0].to(device)
        return Stacked(torch.stack([value.to(device) for value in given]))


def _in_one_thread(task: Callable[[], Update]) -> Update:
    """Run a task with its backward passes in its own thread, which may wait in them, on a GPU too."""
    with torch.autograd.set_multithreading_enabled(False):
        return task()


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
            return parts[0].clone() if parts[0].requires_grad else parts[0]
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
        full = all(size == self._rows.room for size in self._rows.sizes)
        if full and all(part is not None for part in parts):
            return torch.cat(parts)  # type: ignore[arg-type]
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

    @property
    def key(self) -> tuple[Any, ...]:
        return "backward", id(self.joint)


class _JointPass(torch.autograd.Function):
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
    @torch.autograd.function.once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, *ctx.ask(Backward(ctx.share.joint, grads))


@contextmanager
def _bound(places: Mapping[str, NamedTensor], values: Mapping[str, Any]) -> Iterator[None]:
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
def _dropping(model: Backbone, rows: Rows, streams: Sequence[Streams]) -> Iterator[None]:
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
