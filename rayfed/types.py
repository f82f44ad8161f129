"""Messages between server and clients, the state of the server, and types of hyperparameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeAlias

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

Params: TypeAlias = dict[str, Tensor]
"""Tensors by global name. A dict may be partial: a client that holds 3 of 12 blocks sends these 3."""

Batch: TypeAlias = tuple[Tensor, Tensor]
"""Inputs, shape (B, ...), and targets, shape (B,) or, for segmentation, (B, H, W)."""

Row: TypeAlias = dict[str, Any]
"""A row of a table, such as that of a round in rounds.jsonl: values by column."""

Positive: TypeAlias = Annotated[float, Gt(0), Lt(float("inf"))]
NonNegative: TypeAlias = Annotated[float, Ge(0), Lt(float("inf"))]
Fraction: TypeAlias = Annotated[float, Ge(0), Le(1)]
Decay: TypeAlias = Annotated[float, Ge(0), Lt(1)]
Count: TypeAlias = Annotated[int, Ge(1)]
"""Ranges of hyperparameters; the range is checked when a config is read."""

BLOCK = "blocks."
"""Global names of tensors inside block j begin with `blocks.<j>.`"""

EXIT = "exits."
"""Global names of an early exit begin with `exits.<i>-<j>.`; a client with any of blocks i to j holds it."""

RESIDUAL = ".lora_R"
"""Global names of LoRA residuals end with this. They are sent to clients and never trained: they hold what
the factors cannot represent of the mean product (`rayfed.federation.lora_mean`)."""


def block_of(name: str) -> int | None:
    """Index of the backbone block that a global name belongs to; None: it is outside the blocks.

    >>> block_of("blocks.3.attn.proj.lora_A"), block_of("head.weight")
    (3, None)
    """
    return int(name.split(".", 2)[1]) if name.startswith(BLOCK) else None


def is_held(name: str, blocks: Collection[int] | None) -> bool:
    """Whether a client with these blocks (None: all blocks) holds the tensor of this global name.

    >>> is_held("blocks.3.attn.proj.lora_A", (0, 3)), is_held("exits.0-2.weight", (3, 4))
    (True, False)
    """
    if blocks is None:
        return True
    if name.startswith(EXIT):
        first, last = name.split(".", 2)[1].split("-")
        return any(j in blocks for j in range(int(first), int(last) + 1))
    block = block_of(name)
    return block is None or block in blocks


STATISTICS = ("running_mean", "running_var")
"""Names of the running statistics of a BatchNorm layer end with one of these."""


def is_statistic(name: str) -> bool:
    """Whether the name is that of a running mean or variance of a BatchNorm layer.

    Servers average these values, but must not apply an optimizer step to them.

    >>> is_statistic("norm.running_mean"), is_statistic("norm.weight")
    (True, False)
    """
    return name.endswith(STATISTICS)


def num_bytes(value: object) -> int:
    """Bytes of all tensors in a part of a message; numbers and strings are not counted."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(map(num_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(num_bytes, value))
    return 0


@dataclass(frozen=True, kw_only=True)
class Broadcast:
    """Message from the server to one client.

    Attributes:
        round: Round index, from 0.
        params: Values to load before the task runs; absent names keep their initial value.
        shared: What a method sends besides parameters, by name.
        blocks: Global indices of the blocks that the client may hold, ascending; None: all blocks.
        frozen_bytes: Bytes of frozen weights that a real system would send with this message. They are only
            counted as traffic, because every process of the simulation has the weights already.
    """

    round: int
    params: Params
    shared: Mapping[str, Any] = field(default_factory=dict)
    blocks: tuple[int, ...] | None = None
    frozen_bytes: int = 0

    def holds(self, name: str) -> bool:
        """Whether a client with the blocks of this message holds the tensor of this name."""
        return is_held(name, self.blocks)

    def num_bytes(self) -> int:
        """Bytes the client downloads: the tensors it holds, tensors in `shared`, and frozen weights."""
        held = sum(num_bytes(v) for n, v in self.params.items() if self.holds(n))
        return num_bytes(self.shared) + held + self.frozen_bytes


@dataclass(frozen=True, kw_only=True)
class Update:
    """Answer of one client to the server.

    Attributes:
        client: Id of the client.
        params: Trained values, only of names that the client holds.
        num_examples: Number of examples that the answer is based on.
        metrics: Scalars by name, for reports and for server rules.
        extra: What a method sends back besides parameters, by name.
    """

    client: str
    params: Params = field(default_factory=dict)
    num_examples: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def num_bytes(self) -> int:
        """Bytes the client uploads: tensors in `params` and `extra`."""
        return num_bytes(self.params) + num_bytes(self.extra)


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """State of the server between rounds. A checkpoint stores all of it.

    Attributes:
        round: Index, from 0, of the present round, or of the last one between rounds.
        params: Global values of all tensors that are sent and trained.
        shared: Values sent to clients in every broadcast, by name.
        memory: Values kept on the server only, by name.
        blocks: Blocks of the global model; None: all blocks.
        virtual_time: Seconds on the virtual clock since the first round (`rayfed.heterogeneity.faults`).
    """

    round: int
    params: Params
    shared: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)
    blocks: tuple[int, ...] | None = None
    virtual_time: float = 0.0

    def share(self, **values: Any) -> ServerState:
        """A copy of the state with these values added to `shared`."""
        return replace(self, shared={**self.shared, **values})

    def remember(self, **values: Any) -> ServerState:
        """A copy of the state with these values added to `memory`."""
        return replace(self, memory={**self.memory, **values})

    def broadcast(
        self, params: Params | None = None, blocks: tuple[int, ...] | None = None, **private: Any
    ) -> Broadcast:
        """A message for this round.

        Args:
            params: Values to send; None: the global values.
            blocks: Blocks the client may hold; None: the blocks of the global model.
            private: Values added to `shared` in this message only.
        """
        return Broadcast(
            round=self.round,
            params=self.params if params is None else params,
            shared={**self.shared, **private},
            blocks=self.blocks if blocks is None else blocks,
        )
