"""The messages of a round and the state that survives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeAlias

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

Params: TypeAlias = dict[str, Tensor]
"""Tensors by global name. A partial dict is legal everywhere: a client that holds 3 of 12 blocks sends 3."""

Batch: TypeAlias = tuple[Tensor, Tensor]
"""Inputs, shape (B, ...), and targets, shape (B,)."""

Positive: TypeAlias = Annotated[float, Gt(0)]
NonNegative: TypeAlias = Annotated[float, Ge(0)]
Fraction: TypeAlias = Annotated[float, Ge(0), Le(1)]
Count: TypeAlias = Annotated[int, Ge(1)]
"""Ranges of hyperparameters: a field of this type is checked when a config is read."""

BLOCK = "blocks."
"""Global names of tensors inside block j begin with `blocks.<j>.`"""


def block_of(name: str) -> int | None:
    """Index of the backbone block a global name belongs to, None outside the blocks.

    >>> block_of("blocks.3.attn.proj.lora_A"), block_of("head.weight")
    (3, None)
    """
    return int(name.split(".", 2)[1]) if name.startswith(BLOCK) else None


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
    """

    round: int
    params: Params
    shared: Mapping[str, Any] = field(default_factory=dict)
    blocks: tuple[int, ...] | None = None

    def holds(self, name: str) -> bool:
        """Whether a client with these blocks holds the tensor of this name."""
        return self.blocks is None or (block := block_of(name)) is None or block in self.blocks

    def num_bytes(self) -> int:
        """Bytes this client downloads: the tensors it can hold, and what the method shares with it."""
        return num_bytes(self.shared) + sum(num_bytes(v) for n, v in self.params.items() if self.holds(n))


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
    """

    round: int
    params: Params
    shared: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)

    def share(self, **values: Any) -> ServerState:
        return replace(self, shared={**self.shared, **values})

    def remember(self, **values: Any) -> ServerState:
        return replace(self, memory={**self.memory, **values})

    def broadcast(
        self, params: Params | None = None, blocks: tuple[int, ...] | None = None, **private: Any
    ) -> Broadcast:
        """The message of this round; `private` values join `shared` for the one client it is sent to."""
        return Broadcast(
            round=self.round,
            params=self.params if params is None else params,
            shared={**self.shared, **private},
            blocks=blocks,
        )
