"""The interface that every backbone has: input size, blocks, features, head, and tensors by global name.

Its parts run in automatic mixed precision where the config asks for it, with results in float32.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from rayfed.data.data_config import Resize
from rayfed.errors import ConfigError
from rayfed.models.blocks import BlockStack, ExitHeads, has_uniform_blocks, validate
from rayfed.models.clip import ClipHead, TextSide
from rayfed.models.named_tensors import NamedTensor, find_tensors, trained_modules
from rayfed.models.prompters import GCNet
from rayfed.objective import CLASSIFICATION, NEXT_CHARACTER

if TYPE_CHECKING:
    from rayfed.models.behaviour import Behaviour

T = TypeVar("T", Tensor, list[Tensor])


def compute_part(part: Callable[[Tensor], T], x: Tensor, mixed: bool) -> T:
    """The result of a part of a model, in float32.

    Args:
        part: Maps a tensor to a tensor or to a list of tensors, such as a network.
        x: Its input, on the device that computes.
        mixed: Compute matrix products and convolutions in bfloat16.
    """
    with torch.autocast(x.device.type, torch.bfloat16) if mixed else nullcontext():
        result = part(x)
    return [each.float() for each in result] if isinstance(result, list) else result.float()


class NoHead(nn.Module):
    """In place of a head where the network computes its outputs itself; maps them to themselves.

    Args:
        width: Number of outputs.
    """

    weight: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_features = self.out_features = width
        self.register_buffer("weight", torch.zeros(0), persistent=False)  # tells the device

    def forward(self, x: Tensor) -> Tensor:
        return x


class Backbone(nn.Module):
    """A network without its classifier, followed by one head.

    Attributes:
        net: The model of timm or torchvision, or the image tower of a CLIP model. Maps images
            (B, 3, size, size) to features (B, width); for segmentation to a map (B, width, size, size); for
            text, symbols (B, size) to features (B, width); for language models, to features of every token.
        head: The classifier, with PyTorch's default initialization. Of a CLIP model: scaled cosines with the
            class features. For segmentation: a 1 x 1 convolution.
        text: Class prompts and text tower of a CLIP model; None for other models.
        adapter: Module that changes the features before the head; None unless a tuning scheme sets it.
        untuned: Evaluate a CLIP model without what a tuning scheme added; False when a client call begins.
        exits: Early-exit classifiers within the network; None unless a tuning scheme sets them.
        gc_net: Network that makes prompts from the image; None unless a tuning scheme sets it.
        compute: Computes the network, with the arguments and the result of `compute_part`.
        behaviour: Behaviour of the network of a user apart from its outputs; None: it was not
            examined, as networks of libraries are not.
        task: The task the model solves, a name of `rayfed.objective`.
        size: Input height and width in pixels, or the length of a text in characters, or most tokens of one.
        tokenizer: Folder or name of the model whose tokenizer makes tokens of texts; None: it takes no texts.
        classifier: Name of its head in the library; None: it has none there, or several.
        has_new_head: Whether the head is new, so that schemes train it; that of a language model is not.
        resize: How its own transform makes a square of an image: `crop` where it cuts out the centre.
        mean, std: Mean and standard deviation by channel that inputs are normalized with.
        width: Number of features.
        num_classes: Number of logits.
        mixed: Whether the network and the text tower compute in bfloat16; features and logits are float32.
        num_blocks: Number of blocks that can be left out; 0 if the network has no uniform blocks.
        label: The model's name, used in messages.
    """

    def __init__(
        self,
        net: nn.Module,
        head: nn.Linear | nn.Conv2d | ClipHead | NoHead,
        label: str = "this model",
        text: TextSide | None = None,
    ) -> None:
        super().__init__()
        self.label = label
        self.width = head.in_channels if isinstance(head, nn.Conv2d) else head.in_features
        self.num_classes = head.out_channels if isinstance(head, nn.Conv2d) else head.out_features
        self.task = CLASSIFICATION
        self.size: int = 224
        self.tokenizer: str | None = None
        self.classifier: str | None = None
        self.has_new_head = True
        self.resize: Resize = "squash"
        self.mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
        self.std: tuple[float, float, float] = (0.5, 0.5, 0.5)
        if not isinstance(getattr(net, "blocks", None), BlockStack) and has_uniform_blocks(net):
            net.blocks = BlockStack(*net.get_submodule("blocks").children())
        self.net = net
        self.head = head
        self.text = text
        self.adapter: nn.Module | None = None
        self.untuned = False
        self.mixed = False
        self.exits: ExitHeads | None = None
        self.gc_net: GCNet | None = None
        self.compute: Callable[..., Any] = compute_part
        self.behaviour: Behaviour | None = None
        self._frozen_cache: deque[tuple[Tensor, tuple[int, ...], Tensor]] = deque(maxlen=2)
        self._answers: dict[str, bool] = {}
        self._tensors: dict[str, NamedTensor] | None = None
        self._mode_plan: tuple[tuple[bool, ...], list[nn.Module], list[nn.Module]] | None = None

    def features(self, x: Tensor) -> Tensor:
        """Features before the head, computed by the active blocks; shape (B, width) or (B, width, H, W)."""
        return self.encode(x)[0]

    def encode(self, x: Tensor, customize: bool = True) -> tuple[Tensor, Tensor]:
        """Features, and the representation by which methods cluster clients into groups.

        With a GC-Net these are the features computed with its prompts, and the output of the GC-Net. Without
        one, both are the features.

        Args:
            x: Images, shape (B, 3, size, size).
            customize: Whether the GC-Net's output is added to the prompts.

        Returns:
            Two tensors of shape (B, width).
        """
        if self.gc_net is None:
            reusable = self.net_is_frozen and not x.requires_grad
            net = getattr(self.net, "untuned", self.net) if self.untuned else self.net
            features = self.frozen_features(x) if reusable else self.compute(net, x, self.mixed)
            if self.adapter is not None and not self.untuned:
                features = self.adapter(features)
            return features, features
        h = self.gc_net(self.frozen_features(x))
        prompt = self.stack.prompt
        with self.stack.use_prompt(self.gc_net.prompts(prompt, h) if customize else prompt):
            return self.gc_net.dropout(compute_part(self.net, x, self.mixed)), h

    @torch.no_grad()
    def frozen_features(self, x: Tensor) -> Tensor:
        """Features of the frozen network without prompts, shape (B, width).

        The features of the last two batches are kept and returned again for the same tensor `x`.
        """
        if (known := self.remembered_features(x)) is not None:
            return known
        with self.stack.use_prompt(None) if self.num_blocks else nullcontext():
            features = self.compute(self.net, x, self.mixed)
        self.remember_frozen_features(x, features)
        return features

    def remembered_features(self, x: Tensor) -> Tensor | None:
        """Features kept for this tensor object and the active blocks, shape (B, width); None: none are."""
        for batch, blocks, features in self._frozen_cache:
            if batch is x and blocks == self.active:
                return features
        return None

    def forget(self) -> None:
        """Drop what calls leave behind: gradients, and the features of the last batches."""
        self.zero_grad()
        self._frozen_cache.clear()

    def remember_frozen_features(self, x: Tensor, features: Tensor) -> None:
        """Store the features that `frozen_features` returns for this tensor object, without computing them.

        Args:
            x: A batch; it is recognized by identity, not by value.
            features: Its features, shape (B, width).
        """
        self._frozen_cache.append((x, self.active, features.detach()))

    def forward(self, x: Any = None, headless: bool = False, **tokens: Tensor) -> Any:
        """Logits (B, C), or (B, C, H, W) for segmentation.

        With early exits: a list of logits (B, C), one for each exit that the active blocks have.

        Args:
            x: A batch of inputs; of a model of texts also what the tokenizer returns, as it is or by name.
            headless: Return `features` instead of logits.
            **tokens: What the tokenizer returns: input_ids, attention_mask, token_type_ids.
        """
        if not isinstance(x, Tensor):
            joined: Any = self.net.joined
            x = joined(**(tokens if x is None else {**x}))
        if headless or self.exits is None:
            features = self.features(x)
            return features if headless else self.classify(features)
        read = compute_part(partial(self.exits.features, self.net), x, self.mixed)
        return self.exits.logits(read, self.head, self.active)

    def output_with(self, params: Mapping[str, Tensor], x: Tensor, headless: bool = False) -> Any:
        """Output of `forward` with other values of some tensors, by global name; its own are kept."""
        values = {self.module_name(name): value for name, value in params.items()}
        # With tie_weights, a block of a CLIP model, which has two names, would keep the replaced values.
        return torch.func.functional_call(self, values, (x,), {"headless": headless}, tie_weights=False)

    def sample(self, rows: int) -> Tensor:
        """A batch of inputs of zeros, in the shape and on the device of the model."""
        device = self.head.weight.device
        if self.task == NEXT_CHARACTER or self.tokenizer is not None:
            return torch.zeros(rows, self.size, dtype=torch.long, device=device)
        return torch.zeros(rows, 3, self.size, self.size, device=device)

    def deployed(self) -> nn.Module:
        """The model as it is handed to a user: the network of a user's own, or this model."""
        return self

    def classify(self, features: Tensor) -> Tensor:
        """Logits (B, C) from features (B, width), or (B, C, H, W) from (B, width, H, W)."""
        if self.untuned or not self.text_is_live:
            return self.head(features)
        return self.head(features, self.class_features(features))

    def class_features(self, images: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """Text features of the class prompts of a CLIP model, not normalized, shape (C, width).

        `images` and `context` are those of `TextSide.features`.

        Raises:
            ConfigError: The model has no text tower, or its prompts depend on images and none are given.
        """
        if self.text is None:
            raise ConfigError(
                f"model.name: {self.label!r} has no text tower; use clip_mini or open_clip/<name>"
            )
        features = partial(self.text.features, images=images, context=context)
        return compute_part(features, self.head.weight, self.mixed) if self.text_is_live else self.head.weight

    @property
    def is_own(self) -> bool:
        """Whether the network is one that a user handed over."""
        return False

    @property
    def has_own_modes(self) -> bool:
        """Whether a module of the network decides itself what its training mode is."""
        return False

    @property
    def user_sets_modes(self) -> bool:
        """Whether a network that a user handed over has its own `train()` or `eval()` somewhere."""
        return False

    @property
    def net_is_frozen(self) -> bool:
        """Whether no parameter of `net` trains, so that features before the adapter never change."""
        return self._cached_answer("net", self._features_stay)

    def _features_stay(self) -> bool:
        steady = self.behaviour is None or self.behaviour.is_steady
        return steady and not any(p.requires_grad for p in self.net.parameters())

    @property
    def has_frozen_features(self) -> bool:
        """Whether a forward pass needs the `frozen_features` of an image only; these can then be cached."""
        return self.net_is_frozen and self.exits is None and self.gc_net is None

    @property
    def text_is_live(self) -> bool:
        """Whether class features change in training: a prompt, an adapter or the text tower is trained."""
        return self._cached_answer("text", lambda: self.text is not None and self.text.is_live)

    def _cached_answer(self, name: str, compute: Callable[[], bool]) -> bool:
        if name not in self._answers:
            self._answers[name] = compute()
        return self._answers[name]

    def predict(self, output: Any) -> Tensor:
        """The logits (B, C) that predictions are made from.

        Args:
            output: What `forward` returned; with early exits, a list of logits.
        """
        return output if self.exits is None else self.exits.decide(output)

    @property
    def stack(self) -> BlockStack:
        """The container of the network's blocks.

        Raises:
            ConfigError: The network has no uniform blocks.
        """
        blocks = getattr(self.net, "blocks", None)
        if isinstance(blocks, BlockStack):
            return blocks
        raise ConfigError(
            f"model.name: {self.label!r} has no uniform blocks, which can be left out or adapted one by one; "
            f"{self.with_blocks}, or tuning=full or head"
        )

    @property
    def with_blocks(self) -> str:
        """Advice to who needs blocks, for messages."""
        return "use a transformer or a mixer (vit_mini, mixer_b16_224)"

    @property
    def num_blocks(self) -> int:
        blocks = getattr(self.net, "blocks", None)
        return len(blocks) if isinstance(blocks, BlockStack) else 0

    @property
    def active(self) -> tuple[int, ...]:
        """Indices of the blocks that run, ascending. Layers outside the blocks always run."""
        return self.stack.active if self.num_blocks else ()

    @active.setter
    def active(self, blocks: Sequence[int] | None) -> None:
        """Select the blocks that run; None selects all.

        Raises:
            ConfigError: The network has no uniform blocks.
            ValueError: The selection is empty, not ascending, or names a block that does not exist.
        """
        blocks = range(self.num_blocks) if blocks is None else blocks
        if blocks or self.num_blocks:
            self.stack.active = validate(blocks, len(self.stack))

    def tensors(self) -> Mapping[str, NamedTensor]:
        """Parameters, state that training moves, and LoRA residuals by global name; cached, see `refresh`."""
        if self._tensors is None:
            moves = None if self.behaviour is None else self.behaviour.moves
            self._tensors = find_tensors(self, has_blocks=self.num_blocks > 0, moves=moves)
        return self._tensors

    def refresh(self) -> None:
        """Discard the table of `tensors` and every answer derived from it.

        Call this after adding or removing modules and after changing which parameters require gradients.
        Replacing a tensor needs no call.
        """
        self._tensors = None
        self._mode_plan = None
        self._answers = {}

    def note(self, behaviour: Behaviour | None) -> Backbone:
        """Let this model know how its network behaves, so that what moves is among its tensors; returns it.

        Args:
            behaviour: What `rayfed.models.examine` found; None: the network was not examined.
        """
        if behaviour is not None:
            self.behaviour = behaviour
            self.refresh()
        return self

    def module_name(self, name: str) -> str:
        """Translate a global name into the name in this model's state dict, for torch.func.functional_call.

        Raises:
            KeyError: The model has no such tensor.
        """
        return self.tensors()[name].path

    def train(self, mode: bool = True) -> Backbone:
        """Put the modules that are trained into train mode, and all others into evaluation mode.

        A module is in train mode when it holds parameters and all of them require gradients. A module without
        parameters (dropout, stochastic depth, activations) follows the module that contains it, except that
        the dropout of LoRA is on if a part of its adapter is trained. So a frozen backbone behaves as in
        evaluation, frozen BatchNorm layers (also those without affine parameters) keep their statistics, and
        full fine-tuning trains everything.

        Args:
            mode: False puts every module into evaluation mode.
        """
        everything, trained = self._modes()
        for module in everything:
            vars(module)["training"] = False  # nn.Module.__setattr__ takes longer than the whole rest
        for module in trained if mode else ():
            vars(module)["training"] = True
        self.training = mode
        return self

    def _modes(self) -> tuple[list[nn.Module], list[nn.Module]]:
        flags = tuple(entry.is_trained for entry in self.tensors().values())
        if self._mode_plan is None or self._mode_plan[0] != flags:
            # Without the model itself, which would be part of a cycle and stay in memory after its last use.
            every, trained = (
                [module for module in modules if module is not self]
                for modules in (self.modules(), trained_modules(self))
            )
            self._mode_plan = (flags, every, trained)
        return self._mode_plan[1:]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for entry in self.tensors().values():
            if entry.tensor.grad is not None:
                entry.tensor.grad = None if set_to_none else entry.tensor.grad.zero_()


STRIDE = 8
"""`samples_of` takes every eighth row and every eighth column of a feature map."""


def samples_of(features: Tensor) -> Tensor:
    """Features as rows, for statistics over samples.

    Args:
        features: Shape (B, width), or a map of shape (B, width, H, W).

    Returns:
        Features as they are, or one row for each pixel of every eighth row and column, shape (n, width).
    """
    return features if features.ndim == 2 else features[:, :, ::STRIDE, ::STRIDE].movedim(1, -1).flatten(0, 2)
