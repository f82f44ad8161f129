"""CLIP: models of open_clip, split into an image tower, a text side and a head that scores classes.

Radford et al., Learning Transferable Visual Models From Natural Language Supervision, ICML 2021, section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.errors import ConfigError
from rayfed.models.blocks import BlockStack, has_uniform_blocks
from rayfed.models.text_side import TextSide, Tokenizer


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
    """The image side of a CLIP model: maps images (B, 3, size, size) to features (B, width), not normalised.

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
        with self.blocks.wrapped(self.paired.image_block):
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
        weight: Features of the class prompts, not normalised, shape (C, width).
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
            features: Image features, not normalised, shape (B, width).
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
