"""CLIP: models of open_clip, split into an image tower, a text side and a head that scores classes.

Radford et al., Learning Transferable Visual Models From Natural Language Supervision, ICML 2021, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rayfed.errors import ConfigError
from rayfed.models.blocks import BlockStack, has_uniform_blocks

Tokenizer = Callable[[Sequence[str]], Tensor]
Position: TypeAlias = Literal["end", "middle", "front"]
"""Place of the class name among the vectors of a learned context."""

MOST_PROMPTS = 1024
"""Most prompts that the text tower encodes at once, unless there are more classes."""


class TextSide(nn.Module):
    """Class prompts and the text tower that encodes them.

    Attributes:
        tower: open_clip's model without its image tower.
        tokens: Tokens of each class prompt, shape (C, length).
        name_tokens: Tokens of each class name and a full stop, shape (C, length); used with `context`.
        context: Learned vectors, shape (M, text width) or (C, M, text width), which replace the words of the
            template; None unless a tuning scheme sets them.
        position: Place of the class name: after all vectors, after the first half of them, or before them.
        prompter: Module that computes the vectors from `context` (`rayfed.models.prompters`); None: the
            vectors are `context` itself.
        paired: Module that changes what blocks of both towers do (`rayfed.models.paired`); None unless a
            tuning scheme sets it.
        adapter: Module that changes the text features; None unless a tuning scheme sets it.
    """

    tokens: Tensor
    name_tokens: Tensor
    context: nn.Parameter | None

    def __init__(self, tower: Any, names: Sequence[str], template: str, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tower: Any = tower
        names = [name.replace("_", " ") for name in names]
        self.register_buffer("tokens", tokenizer([template.replace("{}", name) for name in names]))
        self.register_buffer("name_tokens", tokenizer([f"{name}." for name in names]))
        self.register_parameter("context", None)
        self.position: Position = "end"
        self.prompter: nn.Module | None = None
        self.paired: Any = None
        self.adapter: nn.Module | None = None
        self._stops: list[int] | None = None

    @property
    def is_live(self) -> bool:
        """Whether class features change in training: a context, an adapter or the tower is trained."""
        return self.context is not None or any(p.requires_grad for p in self.parameters())

    @property
    def width(self) -> int:
        """Number of features of a text."""
        parts = self.tower if hasattr(self.tower, "text_projection") else self.tower.text
        projection = parts.text_projection
        if projection is None:
            return int(parts.ln_final.weight.shape[0])
        return int(projection.out_features if isinstance(projection, nn.Linear) else projection.shape[1])

    @property
    def token_width(self) -> int:
        """Size of the embedding of a token.

        Raises:
            ConfigError: The text tower is of a kind without a table of token embeddings.
        """
        return int(self._parts.token_embedding.embedding_dim)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the tower."""
        return len(self._parts.transformer.resblocks)

    def features(
        self, frozen: Tensor | None = None, images: Tensor | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Features of the class prompts, not normalized.

        Shape (C, width), or (K, C, width) where a prompter makes K prompts for each class.

        Args:
            frozen: Features of the prompts by the frozen tower, used instead of computing them again when
                neither the tower nor a context trains; shape (C, width).
            images: Features of the images that are scored, for a prompter that needs them; shape (B, ...).
            context: Vectors to use instead of those that `prompter` computes, shape as of `self.context`.
        """
        if self.context is not None or self.prompter is not None:
            vectors = self._vectors(frozen, images) if context is None else context
            encoded = self._encode(vectors)
        elif self.paired is not None:
            encoded = self._tower_features(self.tokens)
        elif frozen is None or any(p.requires_grad for p in self.tower.parameters()):
            encoded = self.tower.encode_text(self.tokens)
        else:
            encoded = frozen
        return encoded if self.adapter is None else self.adapter(encoded)

    def _vectors(self, frozen: Tensor | None, images: Tensor | None) -> Any:
        return self.context if self.prompter is None else self.prompter(self.context, frozen, images)

    @property
    def _parts(self) -> Any:
        """The module that holds the layers of the text tower: the model itself, or its attribute `text`."""
        parts = self.tower if hasattr(self.tower, "token_embedding") else getattr(self.tower, "text", None)
        if getattr(parts, "token_embedding", None) is None:
            raise ConfigError(
                "tuning.name: learned class prompts need a text tower with token embeddings; use clip_mini "
                "or a plain model of open_clip such as open_clip/ViT-B-32-quickgelu"
            )
        return parts

    def _encode(self, vectors: Tensor) -> Tensor:
        """Features of the class names with learned vectors, not normalized.

        Zhou et al., Learning to Prompt for Vision-Language Models, IJCV 2022, section 3.2.

        Args:
            vectors: Shape (M, text width) or (C, M, text width), which gives features (C, width); or
                (K, 1, M, text width), which gives those of K prompts of each class, (K, C, width).
        """
        tokens = self.name_tokens
        if vectors.dim() < 4:
            return self._tower_features(tokens, vectors.expand(len(tokens), -1, -1))
        features = []
        for part in vectors.split(max(1, MOST_PROMPTS // len(tokens))):
            learned = part.expand(-1, len(tokens), -1, -1).flatten(0, 1)
            encoded = self._tower_features(tokens.repeat(len(part), 1), learned)
            features.append(encoded.unflatten(0, (len(part), -1)))
        return torch.cat(features)

    def _tower_features(self, tokens: Tensor, learned: Tensor | None = None) -> Tensor:
        """Features (N, width) of N prompts, of class names (N, length) and vectors (N, M, text width)."""
        parts = self._parts
        x = parts.token_embedding(tokens)
        ends = tokens.argmax(-1)
        if learned is not None:
            x = self._join(x, learned)
            ends = ends + learned.shape[1]
        x = self._through_blocks(x + parts.positional_embedding)
        x = parts.ln_final(x)[torch.arange(len(x), device=x.device), ends]
        projection = parts.text_projection
        return projection(x) if isinstance(projection, nn.Linear) else x @ projection

    def _through_blocks(self, x: Tensor) -> Tensor:
        """Tokens (N, length, text width) after all blocks."""
        parts = self._parts
        if self.paired is None:
            after: Tensor = parts.transformer(x, attn_mask=parts.attn_mask)
            return after
        for j, block in enumerate(parts.transformer.resblocks):
            forgets = parts.transformer.grad_checkpointing and torch.is_grad_enabled()
            run = partial(checkpoint, block, use_reentrant=False) if forgets else block
            x = self.paired.text_block(block, partial(run, attn_mask=parts.attn_mask), j, x)
        return x

    def _join(self, words: Tensor, learned: Tensor) -> Tensor:
        """Embeddings of the class names and the learned vectors in the order of `position`.

        Args:
            words: Begin, name, full stop, end and padding, shape (N, length, text width); those of all C
                classes one or several times.
            learned: Vectors, shape (N, M, text width).

        Returns:
            Shape (N, length, text width); M places of the padding are gone.
        """
        length = words.shape[1] - learned.shape[1]
        if self.position == "end":
            return torch.cat((words[:, :1], learned, words[:, 1:length]), dim=1)
        half = learned.shape[1] // 2 if self.position == "middle" else 0
        if self._stops is None:  # where the full stop is; read once, because a device has to be waited for
            self._stops = (self.name_tokens.argmax(-1) - 1).tolist()
        stops = self._stops * (len(words) // len(self._stops))
        rows = [
            torch.cat((word[:1], own[:half], word[1:stop], own[half:], word[stop:length]))
            for word, own, stop in zip(words, learned, stops, strict=True)
        ]
        return torch.stack(rows)


def mini(depth: int = 12) -> nn.Module:
    """The network of clip_mini: an image tower of the size of vit_mini and a text tower of three layers.

    Args:
        depth: Blocks of the image tower.
    """
    from open_clip import CLIP, CLIPTextCfg, CLIPVisionCfg

    from rayfed.models.captions import CONTEXT, VOCABULARY

    vision = CLIPVisionCfg(
        layers=depth,
        width=64,
        head_width=16,
        patch_size=8,
        image_size=32,
        no_ln_pre=True,
        norm_kwargs={"eps": 1e-6},
    )
    text = CLIPTextCfg(
        context_length=CONTEXT, vocab_size=len(VOCABULARY), width=64, heads=4, layers=3, mlp_ratio=4.0
    )
    return CLIP(embed_dim=64, vision_cfg=vision, text_cfg=text)


class ImageTower(nn.Module):
    """The image side of a CLIP model: maps images (B, 3, size, size) to features (B, width), not normalized.

    The blocks of a transformer are its attribute `blocks`, as in timm's models.

    Attributes:
        patches: Return the features of the N patches too, after those of the image: (B, 1 + N, width).
        paired: Module that changes what blocks of both towers do (`rayfed.models.paired`); None unless a
            tuning scheme sets it.
    """

    def __init__(self, visual: Any) -> None:
        super().__init__()
        transformer = getattr(visual, "transformer", None)
        if transformer is not None and isinstance(getattr(transformer, "resblocks", None), nn.ModuleList):
            self.blocks = transformer.resblocks
            if has_uniform_blocks(self):
                self.blocks = transformer.resblocks = BlockStack(*self.blocks)
            else:
                del self.blocks
        self.visual = visual
        self.patches = False
        self.paired: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.paired is None:
            return self.untuned(x)
        with self.blocks.use_change(self.paired.image_block):
            return self.untuned(x)

    def untuned(self, x: Tensor) -> Tensor:
        """Output of `forward` without `paired`."""
        if self.patches:
            image, tokens = self.visual(x)
            return torch.cat((image[:, None], tokens @ self.visual.proj), dim=1)
        features: Tensor = self.visual(x)
        return features

    def add_patches(self) -> bool:
        """Make the tower return the features of patches too; False: it is no transformer that can."""
        if not (hasattr(self, "blocks") and self.visual.attn_pool is None and self.visual.pool_type == "tok"):
            return False
        self.patches = self.visual.output_tokens = True
        return True


class ClipHead(nn.Module):
    """Scores of the classes: scaled cosines between image features and class features.

    Attributes:
        weight: Features of the class prompts, not normalized, shape (C, width).
        scale: Factor on the cosines, the inverse temperature; never trained.
    """

    scale: Tensor

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.in_features = width
        self.out_features = num_classes
        self.weight = nn.Parameter(torch.zeros(num_classes, width))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, features: Tensor, weight: Tensor | None = None) -> Tensor:
        """Scores of the classes, shape (B, C).

        Args:
            features: Image features, not normalized, shape (B, width).
            weight: Class features to use instead of `self.weight`: those of all images, shape (C, width), or
                those of each image, shape (B, C, width).
        """
        texts = F.normalize(self.weight if weight is None else weight, dim=-1)
        images = self.scale * F.normalize(features, dim=-1)
        if weight is None or weight.dim() == 2:
            return F.linear(images, texts)
        return torch.einsum("bd,bcd->bc", images, texts)


def take_apart(
    model: Any, names: Sequence[str], template: str, tokenizer: Tokenizer
) -> tuple[ImageTower, ClipHead, TextSide]:
    """Split a CLIP model into image tower, head and text side, and compute the class features.

    Args:
        model: open_clip's model with its weights, or on the meta device. It loses its image tower and must
            not be used afterwards.
        names: Names of the classes.
        template: Class prompt; {} stands for the name of the class.
        tokenizer: Turns texts into tokens.

    Raises:
        ConfigError: The template has no {}.
    """
    if "{}" not in template:
        raise ConfigError(
            f"model.template: {template!r} has no {{}}; write {{}} where the name of the class goes"
        )
    tower = ImageTower(model.visual)
    del model.visual
    text = TextSide(model.eval(), names, template, tokenizer)
    width = text.width
    head = ClipHead(len(names), width)
    scale = model.logit_scale.detach().exp().clone()
    head.scale = scale.reshape(())
    if not scale.is_meta:
        with torch.no_grad():
            head.weight.copy_(text.features())
    return tower, head, text
