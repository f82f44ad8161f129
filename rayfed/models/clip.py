"""CLIP: open_clip's models, taken apart into an image tower, a text side and a head of class scores.

Radford et al., Learning Transferable Visual Models From Natural Language Supervision, ICML 2021, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.errors import ConfigError, unknown
from rayfed.models.blocks import BlockStack, has_uniform_blocks
from rayfed.models.checkpoints import Published

Tokenizer = Callable[[Sequence[str]], Tensor]

PREFIX = "open_clip/"
"""Before open_clip's name of a model, in `model.name`."""


def mini(depth: int = 12) -> nn.Module:
    """The network of clip_mini: an image tower as large as vit_mini, and three layers for texts."""
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
    """The image side of a CLIP model: images (B, 3, size, size) to raw features (B, width).

    Where it is a transformer its blocks are `blocks`, as in timm's models.
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

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.visual(x)
        return features


class TextSide(nn.Module):
    """Class prompts and the text tower that reads them.

    Attributes:
        tower: open_clip's model without its image tower.
        tokens: Tokens of each class prompt, shape (C, length).
        bare: Tokens of each class name followed by a full stop, for learned contexts, the same shape.
        context: Learned vectors before the class name, shape (M, text width), where a tuning scheme has put
            them; they take the place of the template.
        adapter: Changes text features, where a tuning scheme has put one.
    """

    tokens: Tensor
    bare: Tensor
    context: nn.Parameter | None

    def __init__(self, tower: Any, names: Sequence[str], template: str, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tower: Any = tower
        names = [name.replace("_", " ") for name in names]
        self.register_buffer("tokens", tokenizer([template.replace("{}", name) for name in names]))
        self.register_buffer("bare", tokenizer([f"{name}." for name in names]))
        self.register_parameter("context", None)
        self.adapter: nn.Module | None = None

    @property
    def is_live(self) -> bool:
        """Whether class features depend on something that trains."""
        return self.context is not None or any(p.requires_grad for p in self.parameters())

    @property
    def width(self) -> int:
        """Size of the features of a text."""
        parts = self.tower if hasattr(self.tower, "text_projection") else self.tower.text
        projection = parts.text_projection
        if projection is None:
            return int(parts.ln_final.weight.shape[0])
        return int(projection.out_features if isinstance(projection, nn.Linear) else projection.shape[1])

    @property
    def token_width(self) -> int:
        """Size of a token's embedding.

        Raises:
            ConfigError: This kind of text tower has no embeddings that could be replaced.
        """
        return int(self._parts.token_embedding.embedding_dim)

    def features(self, frozen: Tensor | None = None) -> Tensor:
        """Raw features of the class prompts, shape (C, width).

        Args:
            frozen: What a tower that does not train makes of the prompts, where that is known.
        """
        if self.context is not None:
            found = self._in_context()
        elif frozen is None or any(p.requires_grad for p in self.tower.parameters()):
            found = self.tower.encode_text(self.tokens)
        else:
            found = frozen
        return found if self.adapter is None else self.adapter(found)

    @property
    def _parts(self) -> Any:
        """What holds the layers of the text tower: the model itself, or its `text`."""
        parts = self.tower if hasattr(self.tower, "token_embedding") else getattr(self.tower, "text", None)
        if getattr(parts, "token_embedding", None) is None:
            raise ConfigError("tuning.name: text_prompt needs a text tower of open_clip's own kind")
        return parts

    def _in_context(self) -> Tensor:
        """Zhou et al., Learning to Prompt for Vision-Language Models, IJCV 2022, section 3.2."""
        parts, context = self._parts, self.context
        assert context is not None
        words = parts.token_embedding(self.bare)  # (C, length, text width)
        learned = context.expand(len(words), -1, -1)
        x = torch.cat((words[:, :1], learned, words[:, 1 : words.shape[1] - len(context)]), dim=1)
        x = parts.transformer(x + parts.positional_embedding, attn_mask=parts.attn_mask)
        x = parts.ln_final(x)[torch.arange(len(x), device=x.device), self.bare.argmax(-1) + len(context)]
        projection = parts.text_projection
        return projection(x) if isinstance(projection, nn.Linear) else x @ projection


class ClipHead(nn.Module):
    """Class scores: scaled cosines of image features and class features.

    Attributes:
        weight: Raw features of the class prompts, shape (C, width).
        scale: Factor on the cosines; never trains.
    """

    scale: Tensor

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.in_features, self.out_features = width, num_classes
        self.weight = nn.Parameter(torch.zeros(num_classes, width))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, features: Tensor, weight: Tensor | None = None) -> Tensor:
        """Scores (B, C) of raw features (B, width), against other class features than its own if given."""
        texts = F.normalize(self.weight if weight is None else weight, dim=-1)
        return self.scale * F.normalize(features, dim=-1) @ texts.T


def take_apart(
    model: Any, names: Sequence[str], template: str, tokenizer: Tokenizer
) -> tuple[ImageTower, ClipHead, TextSide]:
    """Image tower, head and text side of a CLIP model, which is used up; class features are computed.

    Args:
        model: open_clip's model, with its weights (or on the meta device).
        names: Names of the classes.
        template: Class prompt, {} is the name.
        tokenizer: From texts to tokens.

    Raises:
        ConfigError: The template has no place for the name.
    """
    if "{}" not in template:
        raise ConfigError(f"model.template: {template!r} has no {{}} for the name of the class")
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


@dataclass(frozen=True, kw_only=True)
class Known:
    """A model of open_clip's, not yet built.

    Attributes:
        name: open_clip's name for it.
        width: Size of the features of both towers.
        size: Input height and width in pixels.
        mean, std: What its inputs are normalised with.
        published: Where the chosen weights are; None: nowhere.
        is_tag: `model.pretrained` named them.
    """

    name: str
    width: int
    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    published: Published | None
    is_tag: bool

    def build(self, options: dict[str, Any]) -> nn.Module:
        """The network with random weights; options go to its constructor."""
        from open_clip import CLIP, CustomTextCLIP, get_model_config

        config = {**(get_model_config(self.name) or {}), **options}
        kind = CustomTextCLIP if config.pop("custom_text", False) else CLIP
        net: nn.Module = kind(**config)
        return net

    def tokenizer(self, texts: Sequence[str]) -> Tensor:
        """open_clip's tokens."""
        from open_clip import get_tokenizer

        with torch.device("cpu"):
            tokens: Tensor = get_tokenizer(self.name)(list(texts))
        return tokens.to(torch.get_default_device())


def known(name: str, pretrained: bool | str) -> Known:
    """What open_clip knows about `open_clip/<model>` and one of its published weights.

    Args:
        name: As in `model.name`.
        pretrained: As in `model.pretrained`: a tag chooses weights, True the first tag that open_clip lists.

    Raises:
        ConfigError: It has no such model, or one with a text tower that cannot be had from open_clip alone.
    """
    import open_clip
    from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
    from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model

    model = name.removeprefix(PREFIX)
    config = open_clip.get_model_config(model)
    if config is None:
        raise ConfigError(unknown("model.name", name, [PREFIX + n for n in open_clip.list_models()]))
    if "multimodal_cfg" in config or "hf_model_name" in config["text_cfg"]:
        raise ConfigError(
            f"model.name: {name!r} has a text tower of another library; choose a plain model such as "
            f"open_clip/ViT-B-32-quickgelu"
        )
    tags = list_pretrained_tags_by_model(model)
    tag = pretrained if isinstance(pretrained, str) else next(iter(tags), "")
    found = get_pretrained_cfg(model, tag) if tag in tags else {}
    size = config["vision_cfg"].get("image_size", 224)
    return Known(
        name=model,
        width=config["embed_dim"],
        size=size if isinstance(size, int) else size[0],
        mean=tuple(found.get("mean") or OPENAI_DATASET_MEAN),
        std=tuple(found.get("std") or OPENAI_DATASET_STD),
        published=_published(found),
        is_tag=isinstance(pretrained, str) and tag in tags,
    )


def _published(found: dict[str, Any]) -> Published | None:
    if repository := found.get("hf_hub"):
        folder, _, file = repository.rpartition("/")
        names = (file,) if file else ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
        return Published(files=names, repository=folder)
    if url := found.get("url"):
        return Published(files=(url.rpartition("/")[2],), url=url)
    return None
