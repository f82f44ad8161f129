"""A network before it becomes a Backbone, with its input format and the source of its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from rayfed.data.config import Resize
from rayfed.models.checkpoints import PublishedWeights
from rayfed.models.text_side import Tokenizer
from rayfed.objective import CLASSIFICATION

Channels = tuple[float, float, float]
IMAGENET_MEAN: Channels = (0.485, 0.456, 0.406)
IMAGENET_STD: Channels = (0.229, 0.224, 0.225)
HALF: Channels = (0.5, 0.5, 0.5)


@dataclass(frozen=True, kw_only=True)
class BareNetwork:
    """A network without classifier and without pre-trained weights.

    Attributes:
        net: The network, with random values, or without values on the meta device.
        width: Number of its features.
        size: Input height and width in pixels, or length of a text in characters.
        mean, std: Mean and standard deviation by channel that its inputs are normalised with.
        classifiers: Names of the classifier's modules in its weight files.
        published: Location of its published weights; None if there are none.
        packaged: File in rayfed/models/weights/ with its weights; empty if there is none.
        load: Reads a published file that is in the authors' own format; None if the file is a state dict.
        is_tag: Whether `model.pretrained` is the tag of published weights, not a path.
        tokenizer: Turns texts into tokens; set for CLIP models only, whose `net` has both towers.
        task: The task that it solves, a name of `rayfed.objective`.
        resize: How its own transform makes a square of an image: `crop` where it cuts out the centre.
    """

    net: nn.Module
    width: int
    size: int
    mean: Channels
    std: Channels
    classifiers: tuple[str, ...]
    published: PublishedWeights | None = None
    packaged: str = ""
    load: Callable[[str], None] | None = None
    is_tag: bool = False
    tokenizer: Tokenizer | None = None
    task: str = CLASSIFICATION
    resize: Resize = "squash"
