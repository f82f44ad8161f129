"""A joint pass of clients that hold different blocks: each block runs once, on the rows of its holders.

The rows of the clients that do not hold a block pass it by unchanged, as each of them alone would skip it.

Letters in shapes: K clients, m rows of a client, H clients that hold a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from rayfed.devices import HOST, CountedDraws, clone_all, counted_seeds, counting
from rayfed.fast.stacked import Stacked
from rayfed.models.backbone import Backbone
from rayfed.models.blocks import BlockStack
from rayfed.models.named_tensors import NamedTensor, bound
from rayfed.objective import NEXT_CHARACTER


class Holders:
    """The blocks that the clients of a joint pass hold; a client is its place among them.

    Attributes:
        blocks: Blocks of each client, ascending, in the order of their rows.
    """

    def __init__(self, blocks: Sequence[tuple[int, ...]]) -> None:
        self.blocks = blocks

    @cached_property
    def are_equal(self) -> bool:
        """Whether all clients hold the same blocks."""
        return all(own == self.blocks[0] for own in self.blocks)

    @cached_property
    def all_blocks(self) -> tuple[int, ...]:
        """Blocks that at least one client holds, ascending."""
        return tuple(sorted({block for own in self.blocks for block in own}))

    @cached_property
    def _of(self) -> dict[int | None, list[int]]:
        every = dict(enumerate(self.blocks))
        found: dict[int | None, list[int]] = {None: [*every]}
        for block in self.all_blocks:
            found[block] = [place for place, own in every.items() if block in own]
        return found

    def of(self, block: int | None) -> list[int]:
        """The clients that hold a block, ascending; None: what lies outside the blocks, which all hold."""
        return self._of.get(block, [])

    def first(self, clients: int) -> Holders:
        """Those among the first clients."""
        return Holders(self.blocks[:clients])


Drawing: TypeAlias = Callable[[Sequence[int]], AbstractContextManager[None]]
"""Lets dropout draw for the clients at these places within a context."""


class CountedDrawing:
    """A `Drawing` on a device, which collects the seeds of the same clients only once."""

    def __init__(self, draws: Sequence[CountedDraws], device: torch.device) -> None:
        """Args: draws: what dropout draws from, for each client. device: that of the rows."""
        self._draws = draws
        self._device = device
        self._seeds: dict[tuple[int, ...], Tensor] = {}

    @contextmanager
    def __call__(self, places: Sequence[int]) -> Iterator[None]:
        """Let dropout draw for these clients."""
        CountedDraws.all_on(self._draws, self._device)  # in one copy, and not in one for each block
        key = tuple(places)
        with counting([self._draws[place] for place in places], self._seeds.get(key)):
            self._seeds[key] = counted_seeds(self._device)
            yield


class RowsOfHolders:
    """Runs the blocks of a network on the rows of their holders: a `Change` of `BlockStack.use_change`.

    What goes from block to block is kept here. On a device a block runs once. On the CPU, where it takes
    little to start an operation, it runs apart for rows that are spared a part of the work, as alone:
    those that have met no trained tensor yet, which need no gradients, and those whose last block it is, of
    which only the class token is read.
    """

    def __init__(
        self,
        stack: BlockStack,
        holders: Holders,
        drawing: Drawing,
        apart: Mapping[int, Sequence[NamedTensor]] | None = None,
        drops: bool = True,
    ) -> None:
        """Begin.

        Args:
            stack: The blocks.
            holders: Who holds what.
            drawing: Lets dropout draw for some of the clients.
            apart: Tensors with values by client of each block, whose rows may run apart; None: they may not.
            drops: Whether dropout is active, with which a class token is not computed alone.
        """
        self._stack = stack
        self._holders = holders
        self._drawing = drawing
        self._apart = apart
        self._ends_early = apart is not None and not drops and stack.tokens is None
        self._rows: list[Tensor] = []
        self._joined: dict[tuple[int, ...], Tensor] = {}
        self._given: Tensor | None = None

    def __call__(
        self, block: nn.Module, run: Any, j: int, x: Tensor, is_first: bool, is_last: bool
    ) -> Tensor:
        """Run a block.

        Args:
            block: The block.
            run: Runs it.
            j: Its index.
            x: The rows of all clients, shape (K m, ...), for the first block; else what was returned before.
            is_first: Whether no block ran before.
            is_last: Whether no block follows.

        Returns:
            The rows of all clients after the last block; before it, a tensor that stands for them.

        Raises:
            NotImplementedError: The network changes rows between its blocks.
        """
        if is_first:
            self._rows = [*x.split(len(x) // len(self._holders.blocks))]
            self._joined = {tuple(self._holders.of(None)): x}
        elif x is not self._given:
            raise NotImplementedError("a network that changes rows between blocks, with unequal blocks")
        for places, ends in self._parts(j):
            rows = self._gathered(places)
            step = partial(self._stack.first_token, block) if ends and self._stack.first_token else run
            with self._drawing(places), self._values(j, places):
                self._keep(places, step(rows))
        self._given = (
            self._gathered(self._holders.of(None)) if is_last else self._rows[self._holders.of(j)[0]]
        )
        return self._given

    def _parts(self, j: int) -> list[tuple[list[int], bool]]:
        """The clients whose rows a block runs on at once, and whether it is the last one of these."""
        own = self._holders.of(j)
        if self._apart is None:
            return [(own, False)]
        parts: dict[tuple[bool, bool], list[int]] = {}
        for place in own:
            ends = self._ends_early and self._holders.blocks[place][-1] == j
            parts.setdefault((self._rows[place].requires_grad, ends), []).append(place)
        return [(places, ends) for (_, ends), places in parts.items()]

    def _gathered(self, places: Sequence[int]) -> Tensor:
        """The rows of some clients, shape (H m, ...)."""
        joined = self._joined.get(tuple(places))
        return torch.cat([self._rows[place] for place in places]) if joined is None else joined

    def _keep(self, places: Sequence[int], y: Tensor) -> None:
        """Keep the output of a block for these clients."""
        self._joined = {own: rows for own, rows in self._joined.items() if not {*own} & {*places}}
        self._joined[tuple(places)] = y
        for place, rows in zip(places, y.split(len(y) // len(places)), strict=True):
            self._rows[place] = rows

    @contextmanager
    def _values(self, j: int, places: Sequence[int]) -> Iterator[None]:
        """Let a block have the values of these clients only, out of those of its holders."""
        own = self._holders.of(j)
        if len(places) == len(own):
            yield
            return
        entries = (self._apart or {}).get(j, ())
        index = torch.tensor([own.index(place) for place in places])
        held: list[Any] = [entry.held[entry.leaf] for entry in entries]
        some = [Stacked(v.value.index_select(0, index)) if isinstance(v, Stacked) else v for v in held]
        with bound(entries, some):
            yield


def why_equal_blocks(model: Backbone) -> str:
    """Why clients that hold different blocks cannot share a pass; empty: they can.

    Args:
        model: The tuned model.
    """
    if not model.num_blocks:
        return "the network has no blocks that can be left out"
    if model.exits is not None:
        return "clients with different blocks have different numbers of exits"
    if model.gc_net is not None:
        return "prompts made from the image need the features of a second pass"
    if model.tokenizer is not None or model.task == NEXT_CHARACTER:
        return "the blocks of a text network need a mask for the rows that they run on"
    return ""


def values_of(stacks: Mapping[str, Tensor], places: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Copies of the values of some clients, shape (H, ...); a device copies all of them at once.

    Args:
        stacks: Values of all clients by global name, shape (K, ...).
        places: The clients whose values are wanted, by global name.
    """
    if not stacks:
        return {}
    if all(len(places[name]) == len(every) for name, every in stacks.items()):
        return clone_all(stacks)
    if next(iter(stacks.values())).device == HOST:
        return {name: torch.stack([every[k] for k in places[name]]) for name, every in stacks.items()}
    copies = {name: every.new_empty((len(places[name]), *every.shape[1:])) for name, every in stacks.items()}
    targets = [one for copy in copies.values() for one in copy.unbind(0)]
    torch._foreach_copy_(targets, [every[k] for name, every in stacks.items() for k in places[name]])
    return copies


def put_values_of(
    stacks: Mapping[str, Tensor], places: Mapping[str, Sequence[int]], values: Mapping[str, Tensor]
) -> None:
    """Write the values of some clients into the stacks. Args: as of `values_of`; values: what it returned."""
    targets = [stacks[name][k] for name in values for k in places[name]]
    torch._foreach_copy_(targets, [one for value in values.values() for one in value.unbind(0)])
