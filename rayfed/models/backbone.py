"""One face for every backbone: size, blocks, features, head, and names that mean the same everywhere."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rayfed.errors import ConfigError
from rayfed.models.blocks import BlockStack, has_uniform_blocks, validate
from rayfed.models.clip import ClipHead, TextSide
from rayfed.models.exits import ExitHeads
from rayfed.models.gc_net import GCNet
from rayfed.models.modes import is_trained_norm, trained_modules
from rayfed.objective import CLASSIFICATION
from rayfed.types import RESIDUAL, STATISTICS, block_of

_ADAPTER = re.compile(r"\.(lora_[AB])\.[^.]+\.weight$")
STRIDE = 8
"""Of pixels that count as samples."""
RESIDUAL_LEAF = RESIDUAL.removeprefix(".")


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


def samples_of(features: Tensor) -> Tensor:
    """Features as rows (n, width), for statistics: of a map, every eighth pixel of every eighth row."""
    return features if features.ndim == 2 else features[:, :, ::STRIDE, ::STRIDE].movedim(1, -1).flatten(0, 2)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a named tensor lives. The owner is asked each time, so a replaced tensor is found.

    Attributes:
        module: The module that owns it.
        leaf: Its attribute there.
        block: Index of the block it is in, None outside the blocks.
        is_buffer: It is a running statistic of a BatchNorm layer or a LoRA residual, not a parameter.
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
        """Parameters: they require gradients. Statistics: the affine parameters beside them do.

        A residual counts as trained: the server changes it, and a client loads it.
        """
        if self.leaf == RESIDUAL_LEAF:
            return True
        return is_trained_norm(self.module) if self.is_buffer else self.tensor.requires_grad


class Backbone(nn.Module):
    """A network without its classifier, and one head.

    Attributes:
        net: timm's or torchvision's model, or the image tower of a CLIP model; maps images
            (B, 3, size, size) to features (B, width). For segmentation: to a map (B, width, size, size); for
            text: symbols (B, size) to (B, width).
        head: The classifier, PyTorch's default initialisation; of a CLIP model: cosines with class features;
            for segmentation: a convolution that looks at single pixels.
        text: Class prompts and text tower of a CLIP model.
        adapter: Changes features before the head, where a tuning scheme has put one.
        untuned: Leave out what a tuning scheme has put beside a CLIP model; off at the begin of every call.
        exits: Classifiers within the network, where a tuning scheme has put some.
        gc_net: Makes prompts that depend on the image, where a tuning scheme has put one.
        task: What it is for (`rayfed.objective`).
        size: Input height and width in pixels, or length of a text.
        mean, std: What inputs are normalised with, by channel.
        width: Size of the features.
        num_classes: Number of logits.
        num_blocks: Blocks that can be left out; 0 where the network has no uniform blocks.
        label: The model's name, for messages.
    """

    def __init__(
        self,
        net: nn.Module,
        head: nn.Linear | nn.Conv2d | ClipHead,
        label: str = "this model",
        text: TextSide | None = None,
    ) -> None:
        super().__init__()
        self.label = label
        if isinstance(head, nn.Conv2d):
            self.width, self.num_classes = head.in_channels, head.out_channels
        else:
            self.width, self.num_classes = head.in_features, head.out_features
        self.task = CLASSIFICATION
        self.size: int = 224
        self.mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
        self.std: tuple[float, float, float] = (0.5, 0.5, 0.5)
        if has_uniform_blocks(net) and not isinstance(net.blocks, BlockStack):
            net.blocks = BlockStack(*net.get_submodule("blocks").children())
        self.net, self.head, self.text = net, head, text
        self.adapter: nn.Module | None = None
        self.untuned = False
        self.exits: ExitHeads | None = None
        self.gc_net: GCNet | None = None
        self._frozen_of: deque[tuple[Tensor, tuple[int, ...], Tensor]] = deque(maxlen=2)
        self._facts: dict[str, bool] = {}
        self._slots: dict[str, Slot] | None = None
        self._mode_plan: tuple[tuple[bool, ...], list[nn.Module], list[nn.Module]] | None = None

    def features(self, x: Tensor) -> Tensor:
        """Features before the head, shape (B, width) or (B, width, H, W), of the active blocks."""
        return self.encode(x)[0]

    def encode(self, x: Tensor, customize: bool = True) -> tuple[Tensor, Tensor]:
        """Features, and what groups of clients are told apart by; both of shape (B, width).

        With a GC-Net: the features under the prompts it makes, and its output. Otherwise the features, twice.

        Args:
            x: Images.
            customize: Whether the GC-Net's output is added to the prompts.
        """
        if self.gc_net is None:
            known = self.net_is_frozen and not x.requires_grad
            features = self.frozen_features(x) if known else self.net(x)
            if self.adapter is not None and not self.untuned:
                features = self.adapter(features)
            return features, features
        h = self.gc_net(self.frozen_features(x))
        prompt = self.stack.prompt
        with self.stack.prompted(self.gc_net.prompts(prompt, h) if customize else prompt):
            return self.gc_net.dropout(self.net(x)), h

    @torch.no_grad()
    def frozen_features(self, x: Tensor) -> Tensor:
        """Features without prompts, of the frozen network; those of the last two batches are remembered."""
        for of, blocks, features in self._frozen_of:
            if of is x and blocks == self.active:
                return features
        with self.stack.prompted(None) if self.num_blocks else nullcontext():
            found: Tensor = self.net(x)
        self.note_frozen(x, found)
        return found

    def note_frozen(self, x: Tensor, features: Tensor) -> None:
        """Say what `frozen_features` of this very tensor are."""
        self._frozen_of.append((x, self.active, features.detach()))

    def forward(self, x: Tensor, headless: bool = False) -> Any:
        """Logits, shape (B, C); with exits a list of them, one per exit that the active blocks have.

        Args:
            x: Images.
            headless: Answer with `features` instead.
        """
        if headless or self.exits is None:
            features = self.features(x)
            return features if headless else self.classify(features)
        return self.exits.logits(self.net, self.head, x)

    def classify(self, features: Tensor) -> Tensor:
        """Logits (B, C) of features (B, width), or (B, C, H, W) of (B, width, H, W)."""
        if self.untuned or not self.text_is_live:
            return self.head(features)
        return self.head(features, self.class_features())

    def class_features(self) -> Tensor:
        """Raw text features of the class prompts of a CLIP model, shape (C, width)."""
        if self.text is None:
            raise ConfigError(
                f"model.name: {self.label!r} has no text tower; use clip_mini or open_clip/<name>"
            )
        return self.text.features(self.head.weight) if self.text_is_live else self.head.weight

    @property
    def net_is_frozen(self) -> bool:
        """Whether an image's features before the adapter never change: nothing in `net` trains."""
        return self._fact("net", lambda: not any(p.requires_grad for p in self.net.parameters()))

    @property
    def has_frozen_features(self) -> bool:
        """Whether `frozen_features` of an image are all that a forward pass needs to know about it."""
        return self.net_is_frozen and self.exits is None and self.gc_net is None

    @property
    def text_is_live(self) -> bool:
        """Whether class features change while the model is tuned."""
        return self.text is not None and self._fact("text", lambda: bool(self.text and self.text.is_live))

    def _fact(self, name: str, ask: Callable[[], bool]) -> bool:
        if name not in self._facts:
            self._facts[name] = ask()
        return self._facts[name]

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
        """Forget the table of `slots`: needed when modules come or go, not when a tensor is replaced.

        Needed too when other parameters than before require gradients.
        """
        self._slots = self._mode_plan = None
        self._facts = {}

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
            if RESIDUAL_LEAF in module._buffers:
                tensors[RESIDUAL_LEAF] = (module._buffers[RESIDUAL_LEAF], True)
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
