"""Prompts customised per image: global prompts, a network that shifts them for each image, and the head.

Gong et al., FedGCR: Achieving Performance and Fairness for Federated Learning with Distinct Client Types via
Group Customization and Reweighting, AAAI 2024, section "Group customization". The frozen network first sees
the image without prompts; GC-Net makes h from its features; then it sees the image with the prompts p_j + h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Lt

from rayfed.models.backbone import Backbone
from rayfed.models.gc_net import GCNet, PromptMix
from rayfed.tuning.visual_prompt import VisualPrompt
from rayfed.types import Count


@dataclass(frozen=True, kw_only=True)
class GCPrompt(VisualPrompt):
    """Global prompts and GC-Net.

    Attributes:
        hidden: Hidden width of GC-Net; none: four times the width of the backbone (3072 for 768, the paper's
            code).
        prompt_mix: `own`: a sample's prompts get its own h; `scramble`: those of up to P other samples of its
            batch, as in the authors' code.
        feature_dropout: On the features before the head, in training; the authors' code has 0.1.
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
