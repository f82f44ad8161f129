"""The interface of tuning schemes, and functions that read and write the tensors that a scheme trains.

Two kinds of tensors are sent between server and clients: trainable parameters, and, where the config averages
them, the running mean and variance of BatchNorm layers whose own parameters are trained. Integer counters of
BatchNorm layers are never sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from rayfed.devices import HOST, clone_all, move
from rayfed.models.backbone import Backbone
from rayfed.models.named_tensors import NamedTensor
from rayfed.registry import TUNING_FILES, Registry
from rayfed.seeds import derive, use_seed
from rayfed.types import Params, is_held


class Tuning(Protocol):
    """A tuning scheme: a frozen dataclass of hyperparameters with `apply`.

    Attributes:
        offers: Features of the tuned model that a Server or Local may require, e.g. `adapter` or `exits`.
    """

    offers: ClassVar[frozenset[str]]

    def apply(self, model: Backbone) -> Backbone:
        """Change the model in place so that exactly the parameters of the scheme require gradients.

        Random start values come from torch's global generator, which `apply_tuning` seeds. On the meta device
        parameters have no values.

        Raises:
            ConfigError: The scheme does not work on this model.
        """
        ...


def apply_tuning(model: Backbone, tuning: Tuning, seed: int) -> Backbone:
    """Apply a scheme to a model, in place; start values of new parameters depend on the seed only.

    Raises:
        ConfigError: The scheme does not work on this model.
    """
    with use_seed(derive(seed, "tuning")):
        tuned = tuning.apply(model)
    tuned.refresh()
    return tuned


def freeze(model: Backbone, train_head: bool = True) -> None:
    """Make every parameter frozen, except those of a new head if `train_head` is true.

    The head of a language model is pre-trained, and often has its weights in common with the embeddings.
    """
    model.requires_grad_(False)
    if model.has_new_head:
        model.head.requires_grad_(train_head)


def trainable(model: Backbone) -> dict[str, nn.Parameter]:
    """Trainable parameters of the active blocks and of all layers outside the blocks, by global name."""
    return _sent_tensors(model, buffers=False)  # type: ignore[return-value]  # without buffers, they are parameters


def kinds(model: Backbone) -> dict[str, frozenset[str]]:
    """Global names of the trained tensors of each kind, `adapters` and `head`, where there are any.

    `head` has the classifier and the exits, `adapters` what else the scheme trains: the tensors that it adds,
    or those of the network that it chooses, as BitFit does. Empty where the scheme trains the whole network,
    of which nothing is an adapter.
    """
    if all(p.requires_grad for p in model.net.parameters()):
        return {}
    names = frozenset(sent_tensors(model))
    head = frozenset(name for name in names if name.startswith(("head.", "exits.")))
    return {kind: own for kind, own in (("adapters", names - head), ("head", head)) if own}


def sent_tensors(model: Backbone, buffers: bool = True) -> dict[str, Tensor]:
    """The tensors that are sent, by global name; not copies.

    Args:
        model: The model; tensors of inactive blocks are left out.
        buffers: Whether trained BatchNorm statistics and LoRA residuals are included besides `trainable`.
    """
    return _sent_tensors(model, buffers)


def copies(model: Backbone, buffers: bool = True) -> Params:
    """Detached copies of the tensors of `sent_tensors`, on the device of the model."""
    return clone_all(_sent_tensors(model, buffers))


def export(model: Backbone, buffers: bool = True) -> Params:
    """Detached copies of the tensors of `sent_tensors`, on the CPU."""
    return move(copies(model, buffers), HOST)


@torch.no_grad()
def load(model: Backbone, params: Mapping[str, Tensor]) -> None:
    """Write values into trainable parameters and trained statistics, also those of inactive blocks.

    If a name or a shape is wrong, nothing is written. Frozen tensors are refused, because they may be memory
    that is shared with other processes.

    Args:
        model: The model to change in place.
        params: Values by global name.

    Raises:
        KeyError: The model has no tensor of a name, or the tensor is frozen.
        ValueError: A value has another shape than the tensor.
    """
    tensors = model.tensors()
    bad = sorted(n for n in params if n not in tensors or not tensors[n].is_trained)
    if bad:
        why = "is frozen" if bad[0] in tensors else "is not in the model"
        raise KeyError(f"{bad[0]!r} {why} ({len(bad)} such names)")
    targets = {n: tensors[n].tensor for n in params}
    for name, value in params.items():
        if targets[name].shape != value.shape:
            shapes = f"{tuple(value.shape)}, the model's has {tuple(targets[name].shape)}"
            raise ValueError(f"{name!r} has shape {shapes}")
    if params:
        torch._foreach_copy_(list(targets.values()), list(params.values()))


def train_mode(model: Backbone) -> None:
    """Put the modules that are trained into train mode, the others into evaluation mode: `Backbone.train`."""
    model.train()


TUNINGS = Registry(
    files=TUNING_FILES,
    attribute="TUNING",
    key="tuning.name",
    accepts=lambda value: isinstance(value, type) and hasattr(value, "apply"),
    expected="a tuning scheme, which is a class with apply()",
)


def _sent_tensors(model: Backbone, buffers: bool) -> dict[str, Tensor]:
    # This runs several times per client call, and most tensors are frozen. A client of a group knows its own
    # ones, other models are asked about each.
    own = getattr(model, "trained", None)
    trained = own(buffers) if own else _trained_tensors(model.tensors(), buffers)
    active = frozenset(model.active)
    return {name: value for name, value in trained.items() if is_held(name, active)}


def _trained_tensors(entries: Mapping[str, NamedTensor], buffers: bool) -> dict[str, Tensor]:
    return {n: e.tensor for n, e in entries.items() if e.is_trained and (buffers or not e.is_buffer)}
