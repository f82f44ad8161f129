"""The config section `model`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rayfed.types import Count, Positive


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A backbone by name.

    Attributes:
        name: `vit_mini`, `mixer_mini`, `clip_mini`, `unet` (segmentation), `char_lstm` (text), `alexnet`
            (torchvision), `alexnet_bn`, `open_clip/<model>` or any timm model. Give the tag of timm's weights
            (`resnet50.tv_in1k`), because the default tag may change with the version of timm.
        pretrained: True: the published weights; False: random values; a path: a local state dict; for models
            of open_clip also the tag of published weights (`openai`).
        size: Input height and width in pixels, or characters in a window; none: the model's default.
        mean: Mean by channel that inputs are normalised with; none: that of the published weights.
        std: Standard deviation by channel that inputs are normalised with; none: that of the published
            weights.
        template: Class prompt of CLIP models; {} stands for the name of the class, whose underscores become
            spaces.
        options: Passed to the model's constructor, e.g. `embed_dim`, `depth`, `num_heads` of a small ViT.
    """

    name: str
    pretrained: bool | str = True
    size: Count | None = None
    mean: tuple[float, float, float] | None = None
    std: tuple[Positive, Positive, Positive] | None = None
    template: str = "a picture of a {}"
    options: dict[str, Any] = field(default_factory=dict)
