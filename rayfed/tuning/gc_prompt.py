"""Prompts that depend on the image: global prompts, GC-Net, which computes an offset of them, and the head.

Cheng, Yeh, Chen, Pastor, Chen, FedGCR, AAAI 2024 [cheng2024fedgcr], section 3.1. The frozen network encodes
an image without prompts, GC-Net computes an offset h from these features, and the network encodes the image
again with the prompts p_j + h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Lt

from rayfed.models.backbone import Backbone
from rayfed.models.prompters import GCNet, PromptMix
from rayfed.tuning.visual_prompt import VisualPrompt
from rayfed.types import Count


@dataclass(frozen=True, kw_only=True)
class GCPrompt(VisualPrompt):
    """Train global prompts, GC-Net and the head.

    Attributes:
        hidden: Hidden width of GC-Net; none: four times the width of the backbone, as in the authors' code
            (3072 for 768).
        prompt_mix: `own` adds a sample's own h to its prompts; `scramble` adds the h of up to P samples of
            the batch, as in the authors' code.
        feature_dropout: Dropout probability of the features before the head in training; 0.1 in the authors'
            code.
    """

    offers: ClassVar[frozenset[str]] = frozenset({"prompts by image"})

    hidden: Count | None = None
    prompt_mix: PromptMix = "own"
    feature_dropout: Annotated[float, Ge(0), Lt(1)] = 0.0

    def apply(self, model: Backbone) -> Backbone:
        super().apply(model)
        hidden = self.hidden or 4 * model.width
        with torch.device(model.head.weight.device):
            model.gc_net = GCNet(model.width, hidden, self.prompt_mix, self.feature_dropout)
        return model


TUNING = GCPrompt
