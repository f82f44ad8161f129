"""Plays a group of clients at once: one forward and one backward pass for the rows of all of them.

The code of every client runs as if it were alone. Where it asks its model for a pass, it waits until all
clients of the group ask for something; passes of the same kind are then computed together, with the values
of each client for its rows, and every client continues with its own rows of the result. Likewise, where it
calls `backward`, the gradients of all clients go through the shared network in one pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from rayfed.federation.joint import Backward, Joint, JointPass, Rows, Share, bound, dropping
from rayfed.federation.member import MemberModel, NotShareableError, Pass
from rayfed.federation.turns import Streams, Turn, take_turns
from rayfed.models.backbone import Backbone
from rayfed.models.named_tensors import NamedTensor
from rayfed.models.stacked import Stacked, stackable
from rayfed.types import Params, Update

log = logging.getLogger(__name__)

MOST_ROWS = 256
"""Most rows of a joint pass without gradients, unless those of one client are more."""


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
        each = self._own(entries, len(values))
        self.models = [
            MemberModel(model, own, blocks, partial(self._ask, k))
            for k, (own, blocks) in enumerate(zip(each, active, strict=True))
        ]

    def _own(self, entries: Mapping[str, NamedTensor], clients: int) -> list[Params]:
        """Trained tensors of each client: views of the stacks, so that a joint pass need not copy them.

        Those of the text side are copies. A client computes with them alone, and must be able to go backward
        through that after another one has changed its own, which counts as a change of every view.
        """
        each: list[Params] = [{} for _ in range(clients)]
        for name, stack in self._stacks.items():
            is_view = name in self._places
            is_buffer = entries[name].is_buffer
            for own, value in zip(each, stack.unbind(0), strict=True):
                value = value if is_view else value.clone()
                own[name] = value if is_buffer else nn.Parameter(value)
        return each

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
        self._model.train()  # a new model is in no defined mode, in which frozen layers may round differently
        try:
            self._resume(dict.fromkeys(range(len(tasks))))
            while requests := {k: t.request for k, t in enumerate(self._turns) if t.request is not None}:
                self._resume(self._answers(requests))
        finally:
            for turn in self._turns:
                turn.cancel()
            self.models.clear()  # they refer to this group, which would be freed late otherwise
            self._model.active = None if self._model.num_blocks else ()
            self._model.untuned = False
        return [turn.result for turn in self._turns if turn.result is not None]

    def _resume(self, answers: Mapping[int, Any]) -> None:
        """Let the code of these clients run until each has a new request or has ended."""
        members = sorted(answers)
        take_turns([self._turns[k] for k in members], [answers[k] for k in members])
        for turn in self._turns:
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
        outputs = JointPass.apply(answer, partial(self._ask, k), request.x, *leaves)
        return answer.joint.shaped(outputs)

    def _answers(self, requests: Mapping[int, Pass | Backward]) -> dict[int, Any]:
        """Compute all requests, those of the same kind together."""
        backward: dict[Joint, dict[int, Sequence[Tensor | None]]] = {}
        forward: dict[Any, dict[int, Pass]] = {}
        for k, request in requests.items():
            if isinstance(request, Backward):
                backward.setdefault(request.joint, {})[k] = request.grads
            else:
                forward.setdefault(request.key, {})[k] = request
        answers: dict[int, Any] = {}
        for joint, grads in backward.items():
            answers |= joint.backward(grads)
        for (kind, *_), passes in forward.items():
            if kind == "frozen_features":
                answers |= {k: self._alone(request) for k, request in passes.items()}
            else:
                for some in _portions(passes):
                    answers |= self._together(some)
        return answers

    def _alone(self, request: Pass) -> Tensor:
        self._model.active = request.state[2]
        return self._model.frozen_features(request.x)

    def _together(self, requests: Mapping[int, Pass]) -> dict[int, Any]:
        """One pass of the network for the rows of these clients."""
        members = list(requests)
        passes = list(requests.values())
        training, gradients, active, untuned = passes[0].state
        model = self._model
        model.active = active
        model.untuned = untuned
        if model.training != training:
            model.train(training)
        rows = Rows(members, [len(p.x) for p in passes])
        held = {n: v for n, v in self._places.items() if v.block is None or v.block in active}
        leaves = {n: self._values(n, members, passes) for n in held}
        own = held.keys() - passes[0].values.keys()  # what a client gave for this pass gets no gradients
        learned = [n for n, v in held.items() if gradients and n in own and not v.is_buffer]
        for name in learned:
            leaves[name].value.requires_grad_()
        x = rows.join([p.x.detach() for p in passes])
        if passes[0].x.requires_grad:
            x.requires_grad_()
        if features := [p.known for p in passes if p.known is not None]:  # of all of them, or of none
            known = rows.join(features)
            x = known if model.has_frozen_features and not x.requires_grad else x
            model.remember_frozen_features(x, known)
        with ExitStack() as stack, torch.set_grad_enabled(gradients):
            stack.enter_context(bound(held, leaves))
            stack.enter_context(dropping(model, rows, self.streams))
            output = getattr(model, passes[0].kind)(x, **passes[0].options)
        joint = Joint(rows, output, {n: leaves[n].value for n in learned}, x if x.requires_grad else None)
        return joint.answers()

    def _values(self, name: str, members: list[int], passes: Sequence[Pass]) -> Any:
        """The values of one tensor for these clients: their own, or those that they gave for this pass."""
        if name not in passes[0].values:
            # A copy: a client may change its values before another one has gone backward through this pass.
            every = self._stacks[name].detach()
            return Stacked(every.clone() if len(members) == len(every) else every[members])
        given = [p.values[name] for p in passes]
        device = self._stacks[name].device
        if all(value is given[0] for value in given):
            return given[0].to(device)
        return Stacked(torch.stack([value.to(device) for value in given]))


def _portions(passes: Mapping[int, Pass]) -> list[dict[int, Pass]]:
    """All clients together in a pass with gradients; without gradients, as many as `MOST_ROWS` allows.

    Batches of an evaluation are large already: more rows would cost memory and save nothing.
    """
    members = list(passes.items())
    gradients = members[0][1].state[1]
    each = max(1, MOST_ROWS // max(len(p.x) for p in passes.values()))
    size = len(members) if gradients else each
    return [dict(members[i : i + size]) for i in range(0, len(members), size)]


def log_failure(clients: Sequence[str], err: Exception) -> None:
    """Log that clients of a group are run one by one.

    Args:
        clients: Their ids.
        err: What `Group` raised. It is a warning where the method or the model cannot be grouped, because
            then every group costs an attempt.
    """
    cause = err.__cause__ or err
    log.info("clients %s are run one by one: %s", ", ".join(clients), cause)
    if isinstance(cause, NotShareableError | NotImplementedError):
        _warn(str(cause))


@cache
def _warn(cause: str) -> None:
    """Warn once per process and cause."""
    log.warning(
        "clients cannot share their passes and are run one by one: %s; train.group=1 saves the attempts",
        cause,
    )


def _in_one_thread(task: Callable[[], Update]) -> Update:
    """Run a task with its backward passes in its own thread, which may wait in them, on a GPU too."""
    with torch.autograd.set_multithreading_enabled(False):
        return task()
