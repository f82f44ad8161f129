"""Memory of one command for what its experiments have in common: data sets, partitions and models."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rayfed.errors import ConfigError
from rayfed.models.backbone import Backbone
from rayfed.models.behaviour import Behaviour
from rayfed.models.shared_weights import dump
from rayfed.models.trunk import has_trained_norms
from rayfed.tuning.base import export, kinds
from rayfed.types import Params, num_bytes, rank_axes

T = TypeVar("T")


class Memo:
    """Remembers what was made for an earlier experiment, by everything that it depends on."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}
        self._purpose = ""
        self._last: dict[str, str] = {}

    def get(self, what: str, depends_on: object, make: Callable[[], T]) -> T:
        """Return `make()`, or its result for an earlier equal value of `depends_on`.

        Args:
            what: Kind of the result.
            depends_on: Plain values or dataclasses of them, whose `repr` shows every difference.
            make: Makes it.
        """
        key = f"{what}: {depends_on!r}"
        if key not in self._made:
            self._made[key] = make()
        self._last[key] = self._purpose
        made: T = self._made[key]
        return made

    def use_for(self, purpose: str, kept: Collection[str]) -> None:
        """Say what things are used for from now on, and forget those that were last used for something else.

        Args:
            purpose: The purpose.
            kept: All purposes whose things are kept.
        """
        self._purpose = purpose
        for key in [key for key, last in self._last.items() if last not in kept]:
            del self._made[key], self._last[key]


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The facts about a built model that an experiment needs.

    Attributes:
        weights: All initial tensors by module name.
        start: Initial values of the tensors that are sent and trained, by global name.
        parts: Start values of the trained tensors of each kind (`rayfed.tuning.base.kinds`), by global name.
        blocks: Number of blocks of the backbone.
        stack: Number of blocks that capacities count, those of a text tower included; 0: no uniform blocks.
        block_bytes: Bytes of the frozen tensors of each block.
        behaviour: Behaviour of the network of a user apart from its outputs; None: it was not examined.
        whole_batch: What in the model computes with all rows of a batch; empty: nothing does.
        no_blocks: The message that says that there are no uniform blocks; empty: there are.
        why_not_single: Why the network cannot train with one row; empty: it can.
        why_alone: Why several clients cannot be trained together with the network; empty: they can.
        why_padded: Why the network cannot compute texts without pads; empty: it can, or it reads no texts.
        frozen: The features of the network do not change in training.
        rank: Rank of the LoRA adapters that train; 0: there are none.
        can_checkpoint: Activations can be computed again between the blocks, which saves memory.
        features: SHA-256 digest of the weights, where the features of frozen parts are kept; else empty.
        tried: Outputs for some examples and their targets, where the loss is a user's and is tried with them.
    """

    weights: Mapping[str, npt.NDArray[Any]]
    start: Params
    parts: Mapping[str, Params]
    blocks: int
    stack: int
    block_bytes: tuple[int, ...]
    behaviour: Behaviour | None
    whole_batch: str
    why_not_single: str
    no_blocks: str
    why_alone: str
    why_padded: str
    frozen: bool
    rank: int
    can_checkpoint: bool
    features: str
    tried: tuple[Tensor, Tensor] | None = None

    def depth(self, by_block: bool, optional: bool = False) -> int:
        """Number of blocks that capacities of clients count.

        Args:
            by_block: The server sends blocks one by one.
            optional: It can do without uniform blocks.

        Raises:
            ConfigError: It does, and the network has no uniform blocks.
        """
        if by_block and self.no_blocks and not optional:
            raise ConfigError(self.no_blocks)
        return self.stack if by_block and not self.no_blocks else self.blocks

    def without(self, names: Collection[str]) -> ModelFacts:
        """The same where tensors of these names are not sent."""
        return replace(self, start={n: v for n, v in self.start.items() if n not in names})

    @classmethod
    def of(cls, model: Backbone, *, buffers: bool, keeps_features: bool, half: bool) -> ModelFacts:
        """The facts about a model that an experiment needs.

        Args:
            buffers: Statistics of BatchNorm are sent.
            keeps_features: Features of the frozen parts may be kept.
            half: Frozen tensors are stored in bfloat16.
        """
        weights = dump(model, half=half)
        keeps_features = keeps_features and (model.has_frozen_features or model.gc_net is not None)
        start = export(model, buffers=buffers)
        ranks = {value.shape[axis] for name, value in start.items() for axis in rank_axes(name)}
        return cls(
            weights=weights,
            start=start,
            parts={kind: {n: start[n] for n in start if n in own} for kind, own in kinds(model).items()},
            blocks=model.num_blocks,
            stack=len(model.stack) if model.num_blocks else 0,
            no_blocks=_no_blocks(model),
            block_bytes=_block_bytes(model),
            behaviour=model.behaviour,
            whole_batch=_of_whole_batches(model),
            why_not_single="",
            why_alone="",
            why_padded="",
            frozen=model.has_frozen_features,
            rank=max(ranks, default=0),
            can_checkpoint=model.num_blocks > 0 and not _of_whole_batches(model) and not model.net_is_frozen,
            features=digest_of(weights) if keeps_features else "",
        )


def _no_blocks(model: Backbone) -> str:
    try:
        len(model.stack)
    except ConfigError as error:
        return str(error)
    return ""


def _of_whole_batches(model: Backbone) -> str:
    if has_trained_norms(model) or getattr(model.gc_net, "mix", "own") != "own":
        return "trained BatchNorm layers" if model.gc_net is None else "tuning.prompt_mix=scramble"
    return "" if model.behaviour is None else model.behaviour.of_whole_batches


def digest_of(weights: Mapping[str, npt.NDArray[Any]]) -> str:
    """SHA-256 hex digest of names, data types, shapes and bytes."""
    out = hashlib.sha256()
    for name in sorted(weights):
        out.update(f"{name}|{weights[name].dtype}|{weights[name].shape}|".encode())
        out.update(np.ascontiguousarray(weights[name]).reshape(-1).view(np.uint8).data)
    return out.hexdigest()


def _block_bytes(model: Backbone) -> tuple[int, ...]:
    sizes = [0] * model.num_blocks
    for slot in model.tensors().values():
        if slot.block is not None and not slot.is_trained:
            sizes[slot.block] += num_bytes(slot.tensor)
    return tuple(sizes)
