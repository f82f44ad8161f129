"""Which tensors of a model train and travel: what a scheme is, and reading and writing its tensors.

Two kinds of tensors travel: trainable parameters, and, where the config averages them, the running mean and
variance of BatchNorm layers whose own parameters train. Integer counters stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from rayfed.models.backbone import Backbone, Slot
from rayfed.registry import TUNING_FILES, Registry
from rayfed.seeds import derive, seeded
from rayfed.types import Params, is_held


class Tuning(Protocol):
    """A scheme: a frozen dataclass of hyperparameters.

    Attributes:
        offers: What halves of an algorithm may rely on.
    """

    offers: ClassVar[frozenset[str]]

    def apply(self, model: Backbone) -> Backbone:
        """Change the model in place so that exactly the scheme's own parameters require gradients.

        Random values come from torch's global stream, which `apply_tuning` sets. On the meta device the
        parameters have no values yet.

        Raises:
            ConfigError: The scheme does not work on this model.
        """
        ...


def apply_tuning(model: Backbone, tuning: Tuning, seed: int) -> Backbone:
    """Apply a scheme with start values that depend on the seed only."""
    with seeded(derive(seed, "tuning")):
        tuned = tuning.apply(model)
    tuned.refresh()
    return tuned


def freeze(model: Backbone, train_head: bool = True) -> None:
    """Nothing but the head (or not even that) requires gradients."""
    model.requires_grad_(False)
    model.head.requires_grad_(train_head)


def trainable(model: Backbone) -> dict[str, nn.Parameter]:
    """Trainable parameters of the active blocks and of everything outside the blocks, by global name."""
    return {n: s.tensor for n, s in _held(model, buffers=False)}  # type: ignore[misc]  # they are parameters


def held(model: Backbone, buffers: bool = True) -> dict[str, Tensor]:
    """The live tensors that travel, by global name: `trainable` and, with buffers, trained statistics."""
    return {n: s.tensor for n, s in _held(model, buffers)}


def export(model: Backbone, buffers: bool = True) -> Params:
    """Detached copies of `held` on the CPU."""
    return {n: _copy(s.tensor.detach()) for n, s in _held(model, buffers)}


@torch.no_grad()
def load(model: Backbone, params: Mapping[str, Tensor]) -> None:
    """Write values into trainable parameters and trained statistics, of inactive blocks too.

    Nothing is written when a name or a shape is wrong. Frozen tensors are refused: they may be mapped memory
    that other processes read.

    Raises:
        KeyError: A name the model does not have, or whose tensor is frozen.
        ValueError: A wrong shape.
    """
    slots = model.slots()
    bad = sorted(n for n in params if n not in slots or not slots[n].is_trained)
    if bad:
        why = "is frozen" if bad[0] in slots else "is not in the model"
        raise KeyError(f"{bad[0]!r} {why} ({len(bad)} such names)")
    targets = {n: slots[n].tensor for n in params}
    for name, value in params.items():
        if targets[name].shape != value.shape:
            shapes = f"{tuple(value.shape)}, the model's has {tuple(targets[name].shape)}"
            raise ValueError(f"{name!r} has shape {shapes}")
    for name, value in params.items():
        targets[name].copy_(value)


def train_mode(model: Backbone) -> None:
    """Put what trains into train mode and leave the rest as in evaluation; the rule is `Backbone.train`'s."""
    model.train()


TUNINGS = Registry(
    files=TUNING_FILES,
    attribute="TUNING",
    key="tuning.name",
    accepts=lambda found: isinstance(found, type) and hasattr(found, "apply"),
    expected="a tuning scheme, which is a class with apply()",
)


def _copy(value: Tensor) -> Tensor:
    return value.cpu() if value.device.type != "cpu" else value.clone()


def _held(model: Backbone, buffers: bool) -> Iterator[tuple[str, Slot]]:
    active = frozenset(model.active)
    for name, slot in model.slots().items():
        # Names are parsed last: most tensors are frozen, and this runs several times per client call.
        if slot.is_trained and (buffers or not slot.is_buffer) and is_held(name, active):
            yield name, slot
