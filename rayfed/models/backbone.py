"""One face for every backbone: size, blocks, features, head, and names that mean the same everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rayfed.errors import ConfigError
from rayfed.models.blocks import BlockStack, has_uniform_blocks, validate
from rayfed.models.exits import ExitHeads
from rayfed.models.modes import is_trained_norm, trained_modules
from rayfed.types import block_of

_ADAPTER = re.compile(r"\.(lora_[AB])\.[^.]+\.weight$")
STATISTICS = ("running_mean", "running_var")


def global_name(module_name: str) -> str:
    """Name of a tensor on the wire: independent of wrappers and of the version of peft.

    >>> global_name("net.blocks.3.attn.proj.base_layer.weight")
    'blocks.3.attn.proj.weight'
    >>> global_name("net.blocks.3.attn.proj.lora_A.default.weight")
    'blocks.3.attn.proj.lora_A'
    >>> global_name("net.blocks.prompt"), global_name("head.bias")
    ('prompt', 'head.bias')
    """
    name = module_name.removeprefix("net.").replace(".base_layer.", ".")
    return "prompt" if name == "blocks.prompt" else _ADAPTER.sub(r".\1", name)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a named tensor lives. The owner is asked each time, so a replaced tensor is found.

    Attributes:
        module: The module that owns it.
        leaf: Its attribute there.
        block: Index of the block it is in, None outside the blocks.
        is_buffer: It is a running statistic of a BatchNorm layer, not a parameter.
        path: Name of the tensor in the Backbone's own state dict.
    """

    module: nn.Module
    leaf: str
    block: int | None
    is_buffer: bool
    path: str

    @property
    def tensor(self) -> Tensor:
        found = (self.module._buffers if self.is_buffer else self.module._parameters)[self.leaf]
        assert found is not None
        return found

    @property
    def is_trained(self) -> bool:
        """Parameters: they require gradients. Statistics: the affine parameters beside them do."""
        return is_trained_norm(self.module) if self.is_buffer else self.tensor.requires_grad


class Backbone(nn.Module):
    """A network without its classifier, and one linear head.

    Attributes:
        net: timm's or torchvision's model; maps images (B, 3, size, size) to features (B, width).
        head: The classifier, PyTorch's default initialisation.
        exits: Classifiers within the network, where a tuning scheme has put some.
        size: Input height and width in pixels.
        mean, std: What inputs are normalised with, by channel.
        width: Size of the features.
        num_blocks: Blocks that can be left out; 0 where the network has no uniform blocks.
        label: The model's name, for messages.
    """

    def __init__(self, net: nn.Module, head: nn.Linear, label: str = "this model") -> None:
        super().__init__()
        self.label, self.width = label, head.in_features
        self.size: int = 224
        self.mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
        self.std: tuple[float, float, float] = (0.5, 0.5, 0.5)
        if has_uniform_blocks(net):
            net.blocks = BlockStack(*net.get_submodule("blocks").children())
        self.net, self.head = net, head
        self.exits: ExitHeads | None = None
        self._slots: dict[str, Slot] | None = None
        self._mode_plan: tuple[tuple[bool, ...], list[nn.Module], list[nn.Module]] | None = None

    def features(self, x: Tensor) -> Tensor:
        """Pooled features before the head, shape (B, width), of the active blocks."""
        return self.net(x)

    def forward(self, x: Tensor) -> Any:
        """Logits, shape (B, C); with exits a list of them, one per exit that the active blocks have."""
        if self.exits is None:
            return self.head(self.features(x))
        return self.exits.logits(self.net, self.head, x)

    def predict(self, output: Any) -> Tensor:
        """Logits (B, C) to decide by, from what `forward` returned."""
        return output if self.exits is None else self.exits.decide(output)

    @property
    def stack(self) -> BlockStack:
        """The container of the blocks.

        Raises:
            ConfigError: The network has no uniform blocks.
        """
        blocks = getattr(self.net, "blocks", None)
        if isinstance(blocks, BlockStack):
            return blocks
        raise ConfigError(
            f"model.name: {self.label!r} has no uniform blocks that could be left out or adapted one by one; "
            f"use a transformer or a mixer (vit_mini, vit_base_patch16_224, mixer_b16_224)"
        )

    @property
    def num_blocks(self) -> int:
        blocks = getattr(self.net, "blocks", None)
        return len(blocks) if isinstance(blocks, BlockStack) else 0

    @property
    def active(self) -> tuple[int, ...]:
        """Blocks that run, ascending global indices; the rest of the network is always there."""
        return self.stack.active if self.num_blocks else ()

    @active.setter
    def active(self, blocks: Sequence[int] | None) -> None:
        """Select blocks; None means all of them.

        Raises:
            ConfigError: The network has no uniform blocks to select from.
            ValueError: Not ascending indices of existing blocks.
        """
        if blocks is None:
            blocks = range(self.num_blocks)
        if blocks or self.num_blocks:
            self.stack.active = validate(blocks, len(self.stack))

    def slots(self) -> Mapping[str, Slot]:
        """Every parameter and BatchNorm statistic by global name. Computed once; see `refresh`."""
        if self._slots is None:
            self._slots = self._find_slots()
        return self._slots

    def refresh(self) -> None:
        """Forget the table of `slots`: needed when modules come or go, not when a tensor is replaced."""
        self._slots = self._mode_plan = None

    def module_name(self, name: str) -> str:
        """The name in this model's state dict, as torch.func.functional_call wants it, for a global name.

        Raises:
            KeyError: The model has no such tensor.
        """
        return self.slots()[name].path

    def train(self, mode: bool = True) -> Backbone:
        """Put what is trained into train mode, and nothing else.

        A module is in train mode when it holds parameters and all of them require gradients; one without
        parameters (dropout, stochastic depth, activations) follows the module it is in, but LoRA's own
        dropout follows its adapter. So a frozen backbone behaves as in evaluation, frozen BatchNorm layers
        (also those without affine parameters) keep their statistics, and full fine-tuning trains everything.
        """
        everything, trained = self._modes()
        for module in everything:
            vars(module)["training"] = False  # past nn.Module.__setattr__, which costs more than all the rest
        for module in trained if mode else ():
            vars(module)["training"] = True
        self.training = mode
        return self

    def _modes(self) -> tuple[list[nn.Module], list[nn.Module]]:
        flags = tuple(slot.is_trained for slot in self.slots().values())
        if self._mode_plan is None or self._mode_plan[0] != flags:
            self._mode_plan = (flags, list(self.modules()), trained_modules(self))
        return self._mode_plan[1:]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for slot in self.slots().values():
            if slot.tensor.grad is not None:
                slot.tensor.grad = None if set_to_none else slot.tensor.grad.zero_()

    def _find_slots(self) -> dict[str, Slot]:
        slots: dict[str, Slot] = {}
        for name, slot in self._walk():
            if name in slots:
                raise RuntimeError(f"{slots[name].path} and {slot.path} would both be called {name!r}")
            slots[name] = slot
        return slots

    def _walk(self) -> Iterator[tuple[str, Slot]]:
        seen: set[Tensor] = set()
        for prefix, module in self.named_modules():
            tensors = {leaf: (p, False) for leaf, p in module._parameters.items()}
            if isinstance(module, _BatchNorm):
                tensors |= {leaf: (module._buffers[leaf], True) for leaf in STATISTICS}
            for leaf, (tensor, is_buffer) in tensors.items():
                if tensor is None or tensor in seen:  # absent, or tied to one that has a name already
                    continue
                seen.add(tensor)
                path = f"{prefix}.{leaf}" if prefix else leaf
                name = self._name(path)
                yield name, Slot(module, leaf, block_of(name), is_buffer, path)

    def _name(self, path: str) -> str:
        name = global_name(path)
        if name.startswith("blocks.") and not self.num_blocks:
            return f"stages.{name.removeprefix('blocks.')}"  # `blocks.<j>.` always means a block to select
        return name
