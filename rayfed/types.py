"""The messages of a round and the state that survives it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeAlias

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

Params: TypeAlias = dict[str, Tensor]
"""Tensors by global name. A partial dict is legal everywhere: a client that holds 3 of 12 blocks sends 3."""

Batch: TypeAlias = tuple[Tensor, Tensor]
"""Inputs, shape (B, ...), and targets, shape (B,) or, for segmentation, (B, H, W)."""

Positive: TypeAlias = Annotated[float, Gt(0), Lt(float("inf"))]
NonNegative: TypeAlias = Annotated[float, Ge(0), Lt(float("inf"))]
Fraction: TypeAlias = Annotated[float, Ge(0), Le(1)]
Decay: TypeAlias = Annotated[float, Ge(0), Lt(1)]
Count: TypeAlias = Annotated[int, Ge(1)]
"""Ranges of hyperparameters: a field of this type is checked when a config is read."""

BLOCK = "blocks."
"""Global names of tensors inside block j begin with `blocks.<j>.`"""

EXIT = "exits."
"""Global names of an early exit begin with `exits.<i>-<j>.`: whoever holds one of blocks i to j has it."""


RESIDUAL = ".lora_R"
"""Names that end so travel to clients but are never trained: what the means of LoRA factors leave out."""


def block_of(name: str) -> int | None:
    """Index of the backbone block a global name belongs to, None outside the blocks.

    >>> block_of("blocks.3.attn.proj.lora_A"), block_of("head.weight")
    (3, None)
    """
    return int(name.split(".", 2)[1]) if name.startswith(BLOCK) else None


def is_held(name: str, blocks: Collection[int] | None) -> bool:
    """Whether somebody with these blocks (None: all of them) holds the tensor of a global name.

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
    """Whether a tensor is a running mean or variance of a BatchNorm layer: averaged, but never stepped on.

    >>> is_statistic("norm.running_mean"), is_statistic("norm.weight")
    (True, False)
    """
    return name.endswith(STATISTICS)


def num_bytes(value: object) -> int:
    """Bytes of all tensors in a message part; numbers and strings count as nothing."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(map(num_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(num_bytes, value))
    return 0


@dataclass(frozen=True, kw_only=True)
class Broadcast:
    """Server to client.

    Attributes:
        round: Round index, from 0.
        params: Values to load before the call; names that are absent keep their start value.
        shared: What a method sends besides parameters, by name.
        blocks: Backbone blocks the client may hold, ascending global indices; None means all of them.
        frozen_bytes: Frozen weights that travel with this message, for the accounts: in the simulation every
            process has them already.
    """

    round: int
    params: Params
    shared: Mapping[str, Any] = field(default_factory=dict)
    blocks: tuple[int, ...] | None = None
    frozen_bytes: int = 0

    def holds(self, name: str) -> bool:
        """Whether a client with these blocks holds the tensor of this name."""
        return is_held(name, self.blocks)

    def num_bytes(self) -> int:
        """Bytes this client downloads: tensors it can hold, what the method shares with it, frozen blocks."""
        held = sum(num_bytes(v) for n, v in self.params.items() if self.holds(n))
        return num_bytes(self.shared) + held + self.frozen_bytes


@dataclass(frozen=True, kw_only=True)
class Update:
    """Client to server.

    Attributes:
        client: Who sends it.
        params: Trained values, only the names this client holds.
        num_examples: Examples behind this update.
        metrics: Scalars by name, for reports and for server rules.
        extra: What a method sends back besides parameters, by name.
    """

    client: str
    params: Params = field(default_factory=dict)
    num_examples: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def num_bytes(self) -> int:
        return num_bytes(self.params) + num_bytes(self.extra)


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """What the server carries from round to round: all of it, and nothing else, is in a checkpoint.

    Attributes:
        round: The round being run, or the last one run.
        params: Global values of every tensor that travels.
        shared: Goes to clients with every broadcast.
        memory: Stays on the server.
        blocks: Blocks the global model consists of; None means all of them.
        virtual_time: Seconds on the virtual clock since the start (`rayfed.heterogeneity.faults`).
    """

    round: int
    params: Params
    shared: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)
    blocks: tuple[int, ...] | None = None
    virtual_time: float = 0.0

    def share(self, **values: Any) -> ServerState:
        return replace(self, shared={**self.shared, **values})

    def remember(self, **values: Any) -> ServerState:
        return replace(self, memory={**self.memory, **values})

    def broadcast(
        self, params: Params | None = None, blocks: tuple[int, ...] | None = None, **private: Any
    ) -> Broadcast:
        """The message of this round; `private` values join `shared` for the one client it is sent to.

        Without `blocks` it goes to clients that hold the blocks of the global model.
        """
        return Broadcast(
            round=self.round,
            params=self.params if params is None else params,
            shared={**self.shared, **private},
            blocks=self.blocks if blocks is None else blocks,
        )
