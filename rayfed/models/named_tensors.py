"""Global names of a model's tensors: independent of wrappers, of the adapter library and of the process.

Also sets which modules are in train mode while a model is tuned.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rayfed.types import RESIDUAL, STATE, STATISTICS, block_of, is_statistic


def is_trained_norm(module: nn.Module) -> bool:
    """Whether this BatchNorm layer has affine parameters that require gradients."""
    weight = module._parameters["weight"]
    return weight is not None and weight.requires_grad


def trained_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that `Backbone.train` puts into train mode; its docstring has the rule."""
    chosen: list[nn.Module] = []
    _collect(model, chosen)
    once = dict.fromkeys(chosen)  # blocks of a CLIP model have two names
    return [m for m in once if not isinstance(m, _BatchNorm) or is_trained_norm(m)]


def _collect(module: nn.Module, chosen: list[nn.Module]) -> bool | None:
    """Add the trained modules within `module` to `chosen`.

    Returns:
        Whether all parameters of the module require gradients; None if it has none.
    """
    below = {name: _collect(child, chosen) for name, child in module.named_children()}
    known = [p.requires_grad for p in module._parameters.values() if p is not None]
    known += [trained for trained in below.values() if trained is not None]
    if not known:
        return None
    trained = all(known)
    by_peft = not trained and _has_trained_adapter(module)
    for name, child in module.named_children():
        if below[name] is None and (trained or by_peft or (name == "lora_dropout" and _adapts(module))):
            chosen.extend(child.modules())
    if trained or by_peft:
        chosen.append(module)
    return trained


def _adapts(layer: nn.Module) -> bool:
    """Whether a part of the adapter of a layer is trained: a factor, or the matrix between both."""
    parts = (layer.get_submodule(name) for name in ("lora_A", "lora_B"))
    return any(p.requires_grad for part in parts for p in part.parameters())


def _has_trained_adapter(layer: nn.Module) -> bool:
    """Whether a layer has an adapter from a configuration of PEFT, a part of which is trained."""
    if not hasattr(layer, "base_layer") or PEFT_ADAPTER not in getattr(layer, "active_adapters", ()):
        return False
    return any(p.requires_grad for name, p in layer.named_parameters() if not name.startswith("base_layer."))


RESIDUAL_LEAF = RESIDUAL.removeprefix(".")
"""Attribute name of the residual matrix of an adapted layer."""

PEFT_ADAPTER = "peft"
"""Name of an adapter of `tuning=peft`, whose tensors keep the names that PEFT gives them."""

_OURS = rf"(?!{PEFT_ADAPTER}\b)[^.]+"
_ADAPTER = re.compile(rf"\.(lora_(?:embedding_)?[AB])\.{_OURS}(?:(?:\.last)?\.weight)?$")
_IA3 = re.compile(rf"\.(ia3_l)\.{_OURS}$")
_CORE = re.compile(r"\.lora_B\.[^.]+\.core\.weight$")


def global_name(module_name: str) -> str:
    """Translate the name of a tensor in a module into its global name, which messages and files use.

    >>> global_name("net.blocks.3.attn.proj.base_layer.weight")
    'blocks.3.attn.proj.weight'
    >>> global_name("net.blocks.3.attn.proj.lora_A.default.weight")
    'blocks.3.attn.proj.lora_A'
    >>> global_name("net.blocks.prompt"), global_name("head.bias")
    ('prompt', 'head.bias')

    Adapters of `tuning=peft` have the names that PEFT gives them:

    >>> global_name("net.blocks.3.attn.proj.lora_A.peft.weight")
    'blocks.3.attn.proj.lora_A.peft.weight'

    Tensors of a network of a user have the names that they have there:

    >>> global_name("net.body.layer1.0.conv1.weight")
    'layer1.0.conv1.weight'
    """
    name = module_name.removeprefix("net.").removeprefix("body.").replace(".base_layer.", ".")
    return "prompt" if name == "blocks.prompt" else _short(name)


def _short(name: str) -> str:
    """Take the names that PEFT gives adapters and their weights out of a name."""
    return _IA3.sub(r".\1", _CORE.sub(".lora_C", _ADAPTER.sub(r".\1", name)))


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """The module and attribute that hold a named tensor.

    `tensor` reads the attribute anew at each access, so it stays correct after the tensor was replaced.

    Attributes:
        module: The module that owns the tensor.
        leaf: Name of the attribute of that module.
        block: Index of the block the tensor belongs to; None outside the blocks.
        is_buffer: True for what no optimizer trains: a running statistic, other state that training moves, or
            a LoRA residual; False for any other parameter.
        path: Name of the tensor in the state dict of the Backbone.
        moves: Whether training was seen to move such state (`rayfed.models.behaviour`); None: it was not
            examined, and statistics of BatchNorm move if the affine parameters of their layer are trained.
    """

    module: nn.Module
    leaf: str
    block: int | None
    is_buffer: bool
    path: str
    moves: bool | None = None

    @property
    def held(self) -> dict[str, Any]:
        """The dictionary of the module that holds the tensor, or what stands for it, by `leaf`."""
        is_there = self.is_buffer and self.leaf in self.module._buffers
        held: Any = self.module._buffers if is_there else self.module._parameters
        return cast(dict[str, Any], held)

    @property
    def tensor(self) -> Tensor:
        """The tensor that the module holds now."""
        tensor: Tensor | None = self.held[self.leaf]
        assert tensor is not None
        return tensor

    @property
    def is_trained(self) -> bool:
        """Whether the tensor changes in an experiment.

        A parameter is trained when it requires gradients; state as `moves` says; a LoRA residual always,
        because the server changes it and clients load it.
        """
        if self.moves is not None:
            return self.moves
        if not self.is_buffer:
            return self.module._parameters[self.leaf].requires_grad  # type: ignore[union-attr]  # it is there
        return self.leaf == RESIDUAL_LEAF or is_trained_norm(self.module)


@contextmanager
def bound(places: Iterable[NamedTensor], values: Iterable[Any]) -> Iterator[None]:
    """Put values into the modules that own these tensors, and the former ones back afterwards."""
    places = list(places)
    before = [place.held[place.leaf] for place in places]
    try:
        for place, value in zip(places, values, strict=True):
            place.held[place.leaf] = value
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.held[place.leaf] = value


def find_tensors(
    model: nn.Module, has_blocks: bool, moves: Collection[str] | None = None
) -> dict[str, NamedTensor]:
    """Collect the parameters, the state that training moves, and the LoRA residuals of a model by name.

    Args:
        model: The Backbone.
        has_blocks: Whether its `blocks` can be selected. Otherwise a name that begins with `blocks.` becomes
            `stages.`, because `blocks.<j>.` always means a block that can be selected.
        moves: Paths of the tensors that training moves and no optimizer trains; None: the network was not
            examined, and the state are the statistics of BatchNorm.

    Raises:
        RuntimeError: Two tensors would have the same global name.
    """
    tensors: dict[str, NamedTensor] = {}
    for name, entry in _walk(model, has_blocks, moves):
        if name in tensors:
            raise RuntimeError(f"{tensors[name].path} and {entry.path} would both be called {name!r}")
        tensors[name] = entry
    return tensors


def _walk(
    model: nn.Module, has_blocks: bool, moves: Collection[str] | None
) -> Iterator[tuple[str, NamedTensor]]:
    seen: set[Tensor] = set()
    for prefix, module in model.named_modules():
        before = f"{prefix}." if prefix else ""
        state = {leaf for leaf in (*module._parameters, *module._buffers) if before + leaf in (moves or ())}
        tensors = {leaf: (p, leaf in state) for leaf, p in module._parameters.items()}
        if isinstance(module, _BatchNorm):
            tensors |= {leaf: (module._buffers[leaf], True) for leaf in STATISTICS}
        tensors |= {leaf: (b, True) for leaf, b in module._buffers.items() if leaf in state}
        if RESIDUAL_LEAF in module._buffers:
            tensors[RESIDUAL_LEAF] = (module._buffers[RESIDUAL_LEAF], True)
        for leaf, (tensor, is_buffer) in tensors.items():
            if tensor is None or tensor in seen:  # absent, or tied to a tensor that already has a name
                continue
            seen.add(tensor)
            path = before + leaf
            name = global_name(path)
            if leaf in state and not is_statistic(name):
                name += STATE
            seen_to_move = leaf in state if is_buffer and moves is not None else None
            seen_to_move = None if leaf == RESIDUAL_LEAF else seen_to_move
            if name.startswith("blocks.") and not has_blocks:
                name = f"stages.{name.removeprefix('blocks.')}"
            yield name, NamedTensor(module, leaf, block_of(name), is_buffer, path, seen_to_move)
