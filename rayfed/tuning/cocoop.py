"""CoCoOp: a learned context of the class prompts, and a small network that changes it for each image.

Zhou et al., Conditional Prompt Learning for Vision-Language Models, CVPR 2022 [zhou2022cocoop], from
summaries of it; its released code was not read. The text tower encodes the prompts of every class for every
image, so that small batches (the paper's have one image) and few classes are advisable.

Differs from the paper: the context begins with random values instead of the words "a photo of a".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rayfed.models.backbone import Backbone
from rayfed.models.prompters import ImageToken
from rayfed.tuning.text_prompt import TextPrompt, check_common
from rayfed.types import Count


@dataclass(frozen=True, kw_only=True)
class CoCoOp(TextPrompt):
    """Train a context, and a network of two layers between image features and the context.

    Attributes:
        reduction: The hidden layer has the width of the image features divided by this.
    """

    offers: ClassVar[frozenset[str]] = frozenset()

    length: Count = 4
    reduction: Count = 16

    def apply(self, model: Backbone) -> Backbone:
        super().apply(model)
        text = check_common(model, self.class_specific, "cocoop")
        hidden = max(1, model.width // self.reduction)
        with torch.device(model.head.weight.device):
            text.prompter = ImageToken(model.width, hidden, text.token_width)
        return model


TUNING = CoCoOp
