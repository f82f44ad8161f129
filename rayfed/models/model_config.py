"""The config section `model`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rayfed.errors import ConfigError
from rayfed.types import Count, Positive

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
"""Suffixes of weight files."""

OPEN_CLIP = "open_clip/"
"""Prefix in `model.name` before the name that open_clip gives a model."""


HF = "hf/"
"""Prefix in `model.name` before the name or the absolute folder of a model of transformers."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A backbone by name.

    Attributes:
        name: `vit_mini`, `mixer_mini`, `clip_mini`, `unet` (segmentation), `char_lstm` (text), `alexnet`
            (torchvision), `alexnet_bn`, `open_clip/<model>`, `text_mini`, `lm_mini`, `hf/<model>` or
            `hf/<absolute folder>` (transformers), or any timm model. Give the tag of timm's weights
            (`resnet50.tv_in1k`), because the default tag may change with the version of timm.
        pretrained: True: the published weights; False: random values; for models of open_clip also the tag of
            published weights (`openai`). In a config, a path here is short for `weights`.
        weights: A local state dict (.safetensors, .pth, .pt, .bin) to use instead, or the folder of a model
            of transformers; none: what `pretrained` says.
        size: Input height and width in pixels, characters in a window, or most tokens of a text; none: the
            model's default.
        mean: Mean by channel that inputs are normalized with; none: that of the published weights.
        std: Standard deviation by channel that inputs are normalized with; none: that of the published
            weights.
        template: Class prompt of CLIP models; {} stands for the name of the class, whose underscores become
            spaces.
        options: Passed to the model's constructor, e.g. `embed_dim`, `depth`, `num_heads` of a small ViT, or
            `num_hidden_layers` of a model of transformers.
    """

    name: str
    pretrained: bool | str = True
    weights: str | None = None
    size: Count | None = None
    mean: tuple[float, float, float] | None = None
    std: tuple[Positive, Positive, Positive] | None = None
    template: str = "a picture of a {}"
    options: dict[str, Any] = field(default_factory=dict)


def with_weights(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """A section `model` in which `pretrained: PATH` is written as `weights: PATH`.

    Of a model of open_clip, a text with a slash or the suffix of a weight file is a path, any other a tag.

    Args:
        section: The section as it was written.

    Raises:
        ConfigError: Both keys name a file.
    """
    value = section.get("pretrained")
    if not isinstance(value, str) or not value:
        return section
    if str(section.get("name")).startswith(OPEN_CLIP) and "/" not in value and not value.endswith(SUFFIXES):
        return section
    if section.get("weights") not in (None, value):
        raise ConfigError(
            f"model.weights: {section['weights']!r} is given, and model.pretrained={value} too; leave out one"
        )
    return {**section, "pretrained": True, "weights": value}
