"""Look up the models of open_clip and their published weights by `model.name` and `model.pretrained`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rayfed.data.config import Resize
from rayfed.errors import ConfigError, unknown
from rayfed.models.checkpoints import PublishedWeights
from rayfed.models.config import OPEN_CLIP


@dataclass(frozen=True, kw_only=True)
class OpenClipModel:
    """A model of open_clip that is not built yet.

    Attributes:
        name: Its name in open_clip.
        width: Number of features of both towers.
        size: Input height and width in pixels.
        mean, std: Mean and standard deviation by channel that its inputs are normalised with.
        published: Location of the chosen weights; None if there are none.
        resize: How its transform makes a square of an image.
        is_tag: Whether `model.pretrained` is the tag of published weights, not a path.
    """

    name: str
    width: int
    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    published: PublishedWeights | None
    is_tag: bool
    resize: Resize = "crop"

    def build(self, options: dict[str, Any]) -> nn.Module:
        """Build the network with random weights.

        Args:
            options: Override open_clip's own arguments of the constructor.
        """
        from open_clip import CLIP, CustomTextCLIP, get_model_config

        config = {**(get_model_config(self.name) or {}), **options}
        kind = CustomTextCLIP if config.pop("custom_text", False) else CLIP
        net: nn.Module = kind(**config)
        return net

    def tokenizer(self, texts: Sequence[str]) -> Tensor:
        """Tokens of texts by open_clip's tokenizer of the model, shape (len(texts), length)."""
        from open_clip import get_tokenizer

        with torch.device("cpu"):
            tokens: Tensor = get_tokenizer(self.name)(list(texts))
        return tokens.to(torch.get_default_device())


def find_model(name: str, pretrained: bool | str) -> OpenClipModel:
    """Look up `open_clip/<model>` and one of its published weights in open_clip's tables.

    Args:
        name: The value of `model.name`.
        pretrained: The value of `model.pretrained`: a tag chooses weights, True the first tag of the model.

    Raises:
        ConfigError: open_clip has no such model, or its text tower is of another library.
    """
    import open_clip
    from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
    from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model

    model = name.removeprefix(OPEN_CLIP)
    config = open_clip.get_model_config(model)
    if config is None:
        raise ConfigError(unknown("model.name", name, [OPEN_CLIP + n for n in open_clip.list_models()]))
    if "multimodal_cfg" in config or "hf_model_name" in config["text_cfg"]:
        raise ConfigError(
            f"model.name: {name!r} has a text tower of another library; choose a plain model such as "
            f"open_clip/ViT-B-32-quickgelu"
        )
    tags = list_pretrained_tags_by_model(model)
    tag = pretrained if isinstance(pretrained, str) else next(iter(tags), "")
    weights = get_pretrained_cfg(model, tag) if tag in tags else {}
    size = config["vision_cfg"].get("image_size", 224)
    return OpenClipModel(
        name=model,
        width=config["embed_dim"],
        size=size if isinstance(size, int) else size[0],
        mean=tuple(weights.get("mean") or OPENAI_DATASET_MEAN),
        std=tuple(weights.get("std") or OPENAI_DATASET_STD),
        published=_open_clip_published(weights),
        is_tag=isinstance(pretrained, str) and tag in tags,
        resize="squash" if weights.get("resize_mode") == "squash" else "crop",
    )


def _open_clip_published(weights: dict[str, Any]) -> PublishedWeights | None:
    if repository := weights.get("hf_hub"):
        folder, _, file = repository.rpartition("/")
        names = (file,) if file else ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
        return PublishedWeights(files=names, repository=folder)
    if url := weights.get("url"):
        return PublishedWeights(files=(url.rpartition("/")[2],), url=url)
    return None
