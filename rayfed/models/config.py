"""Which backbone an experiment uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rayfed.types import Count, Positive


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A backbone by name.

    Attributes:
        name: `vit_mini`, `mixer_mini`, `clip_mini`, `unet` (segmentation), `char_lstm` (text), `alexnet`
            (torchvision), `alexnet_bn`, `open_clip/<model>` or any timm model; write the weights' tag out
            (`resnet50.tv_in1k`), so that another timm version cannot change it.
        pretrained: True: the published weights; False: random; a path: a local state dict; for open_clip's
            models also the tag of published weights (`openai`).
        size: Input height and width in pixels, or characters in a window; none: the model's own.
        mean: Channel means its inputs are normalised with; none: those of the published weights.
        std: Channel deviations its inputs are normalised with; none: those of the published weights.
        template: Class prompt of CLIP models; {} is the name of the class, underscores read as spaces.
        options: Passed to the model's constructor, e.g. `embed_dim`, `depth`, `num_heads` of a small ViT.
    """

    name: str
    pretrained: bool | str = True
    size: Count | None = None
    mean: tuple[float, float, float] | None = None
    std: tuple[Positive, Positive, Positive] | None = None
    template: str = "a picture of a {}"
    options: dict[str, Any] = field(default_factory=dict)
