"""CoOp: learned vectors before the class name replace the words of the class prompt.

Zhou et al., Learning to Prompt for Vision-Language Models, IJCV 2022 [zhou2022coop], section 3.2; both towers
are frozen. By default, as in PromptFL [guo2023promptfl], Algorithm 1, all classes share one context and the
class name is at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from rayfed.errors import ConfigError
from rayfed.models.backbone import Backbone
from rayfed.models.clip import Position, TextSide
from rayfed.tuning.base import freeze
from rayfed.types import Count, NonNegative


@dataclass(frozen=True, kw_only=True)
class TextPrompt:
    """Train the context of the class prompts.

    Attributes:
        length: Number M of vectors; the parameter `text.context` has shape (M, size of a token's embedding).
        init_std: Standard deviation of their normally distributed start values.
        class_specific: Each of the C classes has its own vectors, shape (C, M, size); CoOp's option CSC.
        position: Place of the class name: after the vectors (end), after the first M // 2 of them (middle),
            or before them (front).
    """

    offers: ClassVar[frozenset[str]] = frozenset({"text features"})

    length: Count = 16
    init_std: NonNegative = 0.02
    class_specific: bool = False
    position: Position = "end"

    def apply(self, model: Backbone) -> Backbone:
        text = frozen_text_side(model, self.length)
        shape = [self.length, text.token_width]
        if self.class_specific:
            shape.insert(0, len(text.name_tokens))
        values = torch.empty(shape, device=model.head.weight.device)
        nn.init.normal_(values, std=self.init_std)
        text.context = nn.Parameter(values)
        text.position = self.position
        return model


def frozen_text_side(model: Backbone, length: int = 0) -> TextSide:
    """Freeze a CLIP model, and return its text side.

    Args:
        length: Number of vectors to be put into class prompts.

    Raises:
        ConfigError: The model has no text tower, or its prompts have no room for as many vectors.
    """
    if model.text is None:
        raise ConfigError(
            f"tuning.name: learned class prompts need a text tower, which {model.label!r} does not have; "
            f"use clip_mini or open_clip/<name>"
        )
    freeze(model, train_head=False)
    room = model.text.name_tokens.shape[1] - 2
    if length >= room:
        raise ConfigError(
            f"tuning.length: {length} leaves no room for the class name; choose less than {room}"
        )
    return model.text


def check_common(model: Backbone, class_specific: bool, name: str) -> TextSide:
    """The text side of a model whose context, which `TextPrompt` has set, is the same for all classes.

    Args:
        class_specific: The setting `tuning.class_specific`.
        name: Name of the tuning, for the error.

    Raises:
        ConfigError: Each class has its own context.
    """
    if class_specific:
        raise ConfigError(
            f"tuning.class_specific: cannot be used with tuning={name}, whose context is that of all "
            f"classes; leave it out, or set tuning=text_prompt"
        )
    assert model.text is not None
    return model.text


TUNING = TextPrompt
