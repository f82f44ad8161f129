"""Training of all clients of a group in one loop, which stands for the loop of each of them.

Where clients take the usual steps (the loss of the objective, its gradients, a step of the optimizer), no
code of theirs has to run between two steps. So one loop collects the batches of all, runs the network, goes
backward and steps, and starts as many operations for many clients as for one. Clients are in the order of
their numbers of batches, the largest first, so that those that still train are always the first ones.

Letters in shapes: K clients, m of which have room in a pass, B rows of a client; H clients that hold a block,
h of which have room in a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from copy import copy
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfed.data.examples import network_input
from rayfed.devices import HOST, CountedDraws, counting, move
from rayfed.fast.member import AllSteps
from rayfed.fast.stacked import Stacked
from rayfed.fast.steps import HeldStacks, JointSteps, StepsOfAll
from rayfed.fast.unequal_blocks import (
    CountedDrawing,
    Holders,
    RowsOfHolders,
    put_values_of,
    values_of,
    why_equal_blocks,
)
from rayfed.fast.whole import WholeStack, dropping_by_client, run_whole
from rayfed.federation.passes import logits
from rayfed.models.backbone import Backbone
from rayfed.models.named_tensors import NamedTensor, bound
from rayfed.types import beyond_rank, rank_axes


@dataclass(frozen=True, eq=False)
class Members:
    """The model, values and draws with which the clients of a group compute.

    Attributes:
        model: The model that they share.
        stacks: Values of all trained tensors by global name, shape (K, ...); they are changed in place.
        places: Those of them that may differ between the rows of a pass, and where they are in the model.
        stacked: Makes the values of K clients of a tensor of shape (K, ...), as the layers take them.
        steps: Knows which tensor of an optimizer is part of which stack.
        draws: What dropout on a device draws from, for each client.
        drawing: Makes the context in which dropout on the CPU draws for each client, of the number of its
            rows that are used, and of the number that it has room for.
    """

    model: Backbone
    stacks: Mapping[str, Tensor]
    places: Mapping[str, NamedTensor]
    stacked: type[Stacked]
    steps: JointSteps
    draws: Sequence[CountedDraws]
    drawing: Callable[[Sequence[int], int], AbstractContextManager[Any]]


def train_all(members: Members, requests: Sequence[AllSteps]) -> bool:
    """Train all clients of a group.

    Args:
        members: What they compute with.
        requests: The trainings of the clients.

    Returns:
        Whether it was done; otherwise nothing was changed, and every client has to train by itself.
    """
    model, stacks, places = members.model, members.stacks, members.places
    first = requests[0]
    training, gradients, _, untuned = first.state
    numbers = [len(request.batches) for request in requests]
    if numbers != sorted(numbers, reverse=True) or not all(each.is_like(first) for each in requests):
        return False
    if not (training and gradients) or untuned:
        return False
    holders = Holders([request.state[2] for request in requests])
    if not holders.are_equal and (members.stacked is WholeStack or why_equal_blocks(model)):
        return False
    held = {n: v for n, v in places.items() if holders.of(v.block)}
    learned = [name for name, place in held.items() if not place.is_buffer]
    own = {name: holders.of(place.block) for name, place in held.items()}
    values = {name: stacks[name] for name in held}
    if not holders.are_equal:
        values = values_of(values, own)
    optimizers = [request.optimizer for request in requests]
    given = HeldStacks([values[n].detach() for n in learned], [own[n] for n in learned])
    keeps = any(request.keeps for request in requests)
    together = members.steps.of_all(optimizers, learned, keeps, None if holders.are_equal else given)
    if together is None:
        return False
    model.untuned = untuned
    if not model.training:
        model.train()
    loop = _Loop(replace(members, stacks=values, places=held), learned, requests, holders)
    loop.run(together)
    together.end()
    if not holders.are_equal:
        put_values_of(stacks, own, {name: values[name] for name in learned})
    return True


class _Loop:
    """The loop over the batches of all clients."""

    def __init__(
        self, members: Members, learned: Sequence[str], requests: Sequence[AllSteps], holders: Holders
    ) -> None:
        self._model = members.model
        self._stacks = members.stacks
        self._places = members.places
        self._stacked = members.stacked
        self._holders = holders
        self._own = {name: holders.of(place.block) for name, place in members.places.items()}
        self._learned = learned
        self._draws = list(members.draws)
        self._drawing = members.drawing
        self._requests = requests
        self._device = next(iter(members.stacks.values())).device
        self._objective = requests[0].objective
        self._plan = Filling([request.batches for request in requests])
        self._ones = torch.ones(len(requests), device=self._device)
        self._shares = move(torch.from_numpy(self._plan.shares), self._device)
        self._held_parts = self._masks()
        self._running = len(requests)

    def run(self, optimizer: StepsOfAll) -> None:
        """Take all steps."""
        examples, normalize = self._requests[0].examples, self._requests[0].normalize
        stored = examples.stream(self._plan.places())
        numbered = enumerate(zip(self._plan.counts, self._plan.rooms, strict=True))
        for room, some in groupby(numbered, lambda each: each[1][1]):
            holders = self._holders.first(room)
            self._model.active = holders.all_blocks
            counts = {name: len(holders.of(place.block)) for name, place in self._places.items()}
            leaves = {name: stack[: counts[name]].detach() for name, stack in self._stacks.items()}
            for name in self._learned:
                leaves[name].requires_grad_()
            with ExitStack() as stack:
                values = (self._stacked(leaves[name]) for name in self._places)
                stack.enter_context(bound(self._places.values(), values))
                if not holders.are_equal:
                    drawing = CountedDrawing(self._draws[:room], self._device)
                    rows = RowsOfHolders(self._model.stack, holders, drawing)
                    stack.enter_context(self._model.stack.use_change(rows))
                inputs = {name: leaves[name] for name in self._learned if counts[name]}
                for number, (count, _) in some:
                    x, y = network_input(normalize, next(stored))
                    self._part(count)
                    optimizer.take(count, self._gradients(number, room, inputs, x, y))

    def _gradients(
        self, number: int, room: int, inputs: Mapping[str, Tensor], x: Tensor, y: Tensor
    ) -> list[Tensor | None]:
        """Gradients of the loss of each client in a step, shape (h, ...) each.

        Args:
            number: Number of the step.
            room: Number m of clients in the pass.
            inputs: The trained tensors that these clients hold, by global name.
            x: Inputs, shape (m B, ...).
            y: Targets, shape (m B, ...).
        """
        with self._counting(number, room), torch.enable_grad():
            output = logits(self._output(x, room))
            losses = self._objective.losses_of_clients(output, y, self._shares[number, :room])
        found = torch.autograd.grad(losses, [*inputs.values()], self._ones[:room], allow_unused=True)
        # Contiguous: fused optimizers of CUDA take no other gradients.
        given = zip(inputs, found, strict=True)
        grads = {name: grad.contiguous() for name, grad in given if grad is not None}
        masked = {name: mask[: len(grads[name])] for name, mask in self._held_parts.items() if name in grads}
        if masked:
            torch._foreach_mul_([grads[name] for name in masked], [*masked.values()])
        return [grads.get(name) for name in self._learned]

    def _output(self, x: Tensor, room: int) -> Any:
        """Output of the network for the rows of m clients, shape (m B, ...)."""
        if self._stacked is not WholeStack:
            return self._model.forward(x)
        with dropping_by_client(self._model, room):
            return run_whole(self._model.forward, x, room)

    def _counting(self, number: int, room: int) -> AbstractContextManager[Any]:
        """The context in which dropout draws in a step."""
        if self._device != HOST:
            return counting(self._draws[:room])
        return self._drawing(self._plan.sizes[number][:room], self._plan.size)

    def _masks(self) -> dict[str, Tensor]:
        """1 for what a client of its rank holds and 0 beyond, by name, where some client has its own rank."""
        ranks = {k: request.rank for k, request in enumerate(self._requests) if request.rank is not None}
        cut = [name for name in self._learned if ranks and rank_axes(name)]
        masks = {name: torch.ones_like(self._stacks[name]) for name in cut}
        for name, mask in masks.items():
            for own, k in zip(mask, self._own[name], strict=True):
                for part in beyond_rank(name, own, ranks.get(k)):
                    part.zero_()
        return masks

    def _part(self, count: int) -> None:
        """Let clients whose training has ended draw no further numbers: copies of their draws go on."""
        for k in range(count, self._running):
            going = copy(self._draws[k])
            going.state = self._draws[k].state
            self._draws[k] = going
        self._running = count


class Filling:
    """The examples of each pass.

    Every client has room for as many rows as the largest batch. What a client leaves of it is filled with its
    first example, which has no share in its loss. A client that has ended fills its room in the same way,
    until fewer than half of the clients of a pass still train. So passes have few shapes.

    Attributes:
        size: Number B of rows of a client.
        sizes: Examples of each client in each step, 0 for one that has ended.
        counts: Number of clients that train in each step.
        rooms: Number m of clients that have room in each step.
        shares: Share of each row in the loss of its client, float32, shape (steps, K, B).
    """

    def __init__(self, batches: Sequence[Sequence[Tensor]]) -> None:
        """Args: batches: places of the examples of each batch of each client, most batches first."""
        numbers = [len(own) for own in batches]
        self.size = max(len(batch) for own in batches for batch in own)
        self.sizes = [[len(own[i]) if i < len(own) else 0 for own in batches] for i in range(max(numbers))]
        self._rows = np.empty((max(numbers), len(batches), self.size), np.int64)
        self.shares = np.zeros(self._rows.shape, np.float32)
        for k, own in enumerate(batches):
            self._rows[:, k] = int(own[0][0])
            self.shares[:, k, 0] = 1
            for i, batch in enumerate(own):
                self._rows[i, k, : len(batch)] = batch.numpy()
                self.shares[i, k, : len(batch)] = 1 / len(batch)
        self.counts = [sum(number > i for number in numbers) for i in range(max(numbers))]
        self.rooms = [_room(count, len(batches)) for count in self.counts]

    def places(self) -> list[Tensor]:
        """Places of the examples of each pass, int64, shape (m B,)."""
        return [
            torch.from_numpy(rows[:m].reshape(-1)) for rows, m in zip(self._rows, self.rooms, strict=True)
        ]


def _room(count: int, clients: int) -> int:
    """Number of clients in a pass: all, or half of them, a quarter and so on, as long as `count` fit."""
    while (half := -(-clients // 2)) >= count and half < clients:
        clients = half
    return clients
