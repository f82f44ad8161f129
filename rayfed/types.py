"""Messages between server and clients, their sizes in bytes, the state of the server, types of settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias

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

Head: TypeAlias = Literal["shared", "personal", "frozen"]
"""Values of the key `head`: the server combines those of the clients, each keeps its own, or none trains."""

BLOCK = "blocks."
"""Global names of tensors inside block j begin with `blocks.<j>.`"""

EXIT = "exits."
"""Global names of an early exit begin with `exits.<i>-<j>.`; a client with any of blocks i to j holds it."""

RESIDUAL = ".lora_R"
"""Global names of LoRA residuals end with this. They are sent to clients and never trained: they hold what
the factors cannot represent of the mean product (`rayfed.federation.aggregation`)."""


@cache
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


FACTORS = {".lora_A": (0,), ".lora_B": (1,), ".lora_C": (0, 1)}
"""Dimensions of the tensors of a LoRA adapter along which the rank counts, by the end of their global name:
the rows of A, the columns of B, and both of the core C between them."""


def rank_axes(name: str) -> tuple[int, ...]:
    """Dimensions of the tensor of this global name along which the rank of LoRA counts; most have none.

    >>> rank_axes("blocks.3.attn.proj.lora_B"), rank_axes("head.weight")
    ((1,), ())
    """
    return FACTORS.get(name[-len(".lora_A") :], ())


def up_to_rank(name: str, value: Tensor, rank: int | None) -> Tensor:
    """The part of a tensor that a client of this rank holds, as a view; None: all of it.

    A client of rank k holds the first k rows of A and the first k columns of B.
    """
    if rank is not None:
        for axis in rank_axes(name):
            value = value.narrow(axis, 0, min(rank, value.shape[axis]))
    return value


def beyond_rank(name: str, value: Tensor, rank: int | None) -> list[Tensor]:
    """The parts of a tensor that a client of this rank does not hold, as views; None: it holds all."""
    if rank is None:
        return []
    return [
        value.narrow(axis, rank, value.shape[axis] - rank)
        for axis in rank_axes(name)
        if value.shape[axis] > rank
    ]


def cut_to_rank(params: Params, rank: int | None) -> Params:
    """Tensors with zeros where a client of this rank holds nothing; those that change are copied."""
    if rank is None:
        return params
    cut = {name: value.clone() for name, value in params.items() if beyond_rank(name, value, rank)}
    for name, value in cut.items():
        for part in beyond_rank(name, value, rank):
            part.zero_()
    return {**params, **cut}


STATISTICS = ("running_mean", "running_var")
"""Names of the running statistics of a BatchNorm layer end with one of these."""

STATE = ".state"
"""Names of other tensors that training moves without an optimizer, such as a moving mean, end with this."""


def is_statistic(name: str) -> bool:
    """Whether the name is that of a tensor that training moves without an optimizer.

    These are the running mean and variance of a BatchNorm layer, and other state of a user's network. Servers
    average these values, but must not apply an optimizer step to them.

    >>> is_statistic("norm.running_mean"), is_statistic("moving_mean.state"), is_statistic("norm.weight")
    (True, True, False)
    """
    return name.endswith((*STATISTICS, STATE))


def num_bytes(value: object) -> int:
    """Bytes of all tensors in a part of a message; numbers and strings are not counted."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(map(num_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(num_bytes, value))
    return 0


def _bytes_at_rank(params: Params, rank: int | None) -> int:
    """Bytes of tensors at a client of this rank; None: it holds all of them."""
    if rank is None:
        return sum([value.nbytes for value in params.values()])
    return sum(up_to_rank(name, value, rank).nbytes for name, value in params.items())


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
        rank: Rank of the client's LoRA adapters; None: that of the tuning. `Cohort.run` sets it. What lies
            beyond it in A and B is zero at the client, and is not counted as traffic.
    """

    round: int
    params: Params
    shared: Mapping[str, Any] = field(default_factory=dict)
    blocks: tuple[int, ...] | None = None
    frozen_bytes: int = 0
    rank: int | None = None

    def holds(self, name: str) -> bool:
        """Whether a client with the blocks of this message holds the tensor of this name."""
        return is_held(name, self.blocks)

    def num_bytes(self) -> int:
        """Bytes the client downloads: the tensors it holds, tensors in `shared`, and frozen weights."""
        held = self.params
        if self.blocks is not None:
            held = {name: value for name, value in held.items() if self.holds(name)}
        return num_bytes(self.shared) + _bytes_at_rank(held, self.rank) + self.frozen_bytes


def at_rank(sent: Broadcast) -> Broadcast:
    """The message with zeros beyond the rank of the client, as it is there."""
    return sent if sent.rank is None else replace(sent, params=cut_to_rank(sent.params, sent.rank))


@dataclass(frozen=True, kw_only=True)
class Update:
    """Answer of one client to the server.

    Attributes:
        client: Id of the client.
        params: Trained values, only of names that the client holds.
        num_examples: Number of examples that the answer is based on.
        metrics: Scalars by name, for reports and for server rules.
        extra: What a method sends back besides parameters, by name.
        rank: Rank of the client's LoRA adapters; None: that of the tuning. What lies beyond it in A and B is
            zero, and is not counted as traffic.
        steps: Training batches that the client drew for this answer; set where the client runs.
        rows: Examples in these batches, those drawn several times counted each time.
        tokens: Tokens of texts in these batches, without pads.
        learned: Of these, those that a language model learned, such as the tokens of answers.
        scored: What a scoring of several clients together needs, on the CPU: outputs and targets of their
            test sets, or counts by class. No method sees it, and it is not counted as traffic.
    """

    client: str
    params: Params = field(default_factory=dict)
    num_examples: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    rank: int | None = None
    steps: int = 0
    rows: int = 0
    tokens: int = 0
    learned: int = 0
    scored: Mapping[str, Tensor] = field(default_factory=dict)

    def num_bytes(self) -> int:
        """Bytes the client uploads: tensors in `params` and `extra`."""
        return _bytes_at_rank(self.params, self.rank) + num_bytes(self.extra)


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
