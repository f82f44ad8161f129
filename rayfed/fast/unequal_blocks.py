"""A joint pass of clients that hold different blocks: each block runs once, on the rows of its holders.

The rows of the clients that do not hold a block pass it by unchanged, as each of them alone would skip it.

Letters in shapes: K clients, m rows of a client, H clients that hold a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from rayfed.devices import HOST, CountedDraws, clone_all, counted_seeds, counting
from rayfed.models.backbone import Backbone
from rayfed.objective import NEXT_CHARACTER


class Holders:
    """Which clients of a joint pass hold which blocks; a client is its place among them.

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
        held = {j: [place for place, own in every.items() if j in own] for j in self.all_blocks}
        return {None: [*every], **held}

    def of(self, block: int | None) -> list[int]:
        """The clients that hold a block, ascending; None: what lies outside the blocks, which all hold."""
        return self._of.get(block, [])

    def first(self, clients: int) -> Holders:
        """Those among the first clients."""
        return Holders(self.blocks[:clients])


class RowsOfHolders:
    """Runs the blocks of a network on the rows of their holders: a `Change` of `BlockStack.use_change`.

    Between two blocks goes what the holders of the next one have; the rows of others wait here. So one
    operation collects rows before each block whose holders differ from those of the block before.
    """

    def __init__(self, holders: Holders, draws: Sequence[CountedDraws]) -> None:
        """Begin.

        Args:
            holders: Who holds what.
            draws: What dropout on a device draws from, for each client; empty on the CPU.
        """
        self._holders = holders
        self._draws = draws
        self._seeds: dict[int, Tensor] = {}
        self._rows: list[Tensor] = []
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
            The rows of the holders of the next block, or of all clients after the last one.

        Raises:
            NotImplementedError: The network changes rows between its blocks.
        """
        own = self._holders.of(j)
        if is_first:
            self._rows = list(x.split(len(x) // len(self._holders.blocks)))
            x = x if len(own) == len(self._rows) else self._gathered(own)
        elif x is not self._given:
            raise NotImplementedError(
                "the network changes rows between its blocks, which clients hold unequally"
            )
        with self._drawing(j, own, x.device):
            y: Tensor = run(x)
        if is_last:
            self._given = self._after(y, own, self._holders.of(None))
            self._rows = []
        else:
            self._given = self._after(y, own, self._holders.of(self._following(j)))
        return self._given

    def _following(self, j: int) -> int:
        """The block that runs after this one."""
        blocks = self._holders.all_blocks
        return blocks[blocks.index(j) + 1]

    def _gathered(self, places: Iterable[int]) -> Tensor:
        """The rows of some clients, shape (H m, ...)."""
        return torch.cat([self._rows[place] for place in places])

    def _after(self, y: Tensor, own: Sequence[int], following: Sequence[int]) -> Tensor:
        """Keep the output of a block; returns the rows of these clients. Args: own: holders of the block."""
        if own == following:
            return y
        for place, rows in zip(own, y.split(len(y) // len(own)), strict=True):
            self._rows[place] = rows
        return self._gathered(following)

    @contextmanager
    def _drawing(self, j: int, own: Sequence[int], device: torch.device) -> Iterator[None]:
        """Let dropout on a device draw for the holders of a block, whose seeds are collected once."""
        if not self._draws:
            yield
            return
        CountedDraws.all_on(self._draws, device)  # in one copy, and not in one for each block
        with counting([self._draws[place] for place in own], self._seeds.get(j)):
            self._seeds[j] = counted_seeds(device)
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
    if getattr(model.net, "paired", None) is not None:
        return "the blocks are changed together with those of the text tower"
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
