"""What is known about a network before it becomes a Backbone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from rayfed.models.checkpoints import Published
from rayfed.models.clip import Tokenizer
from rayfed.objective import CLASSIFICATION

Channels = tuple[float, float, float]
IMAGENET_MEAN: Channels = (0.485, 0.456, 0.406)
IMAGENET_STD: Channels = (0.229, 0.224, 0.225)
HALF: Channels = (0.5, 0.5, 0.5)


@dataclass(frozen=True, kw_only=True)
class Bare:
    """A network without classifier and weights, and what is known about it.

    Attributes:
        net: Random, or without values on the meta device.
        width: Size of its features.
        size: Input height and width in pixels, or length of a text.
        mean, std: What its inputs are normalised with.
        classifiers: What its weight files call the classifier.
        published: Where its weights are; None: nowhere.
        packaged: File in rayfed/models/weights/ that holds them instead.
        load: How a published file in the first authors' own format is read; None: it is a state dict.
        is_tag: `model.pretrained` names the published weights, it is not a path.
        tokenizer: Of a CLIP model, which `net` then is as a whole.
        task: What it is for.
    """

    net: nn.Module
    width: int
    size: int
    mean: Channels
    std: Channels
    classifiers: tuple[str, ...]
    published: Published | None = None
    packaged: str = ""
    load: Callable[[str], None] | None = None
    is_tag: bool = False
    tokenizer: Tokenizer | None = None
    task: str = CLASSIFICATION
