"""Adapters parallel to the last blocks of both towers of a CLIP model, which share their middle layers.

Yang et al., MMA: Multi-Modal Adapter for Vision-Language Models, CVPR 2024 [yang2024mma], as in its released
code: a linear layer to a few numbers and ReLU, the common linear layer and ReLU, and a linear layer back,
times a small factor. `algorithm=pfedmma` sends the common layers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rayfed.models.backbone import Backbone
from rayfed.models.paired import PairedAdapters, both_towers, pair
from rayfed.tuning.text_prompt import frozen_text_side
from rayfed.types import Count, Positive


@dataclass(frozen=True, kw_only=True)
class MultimodalAdapter:
    """Train the adapters: `paired.image`, `paired.text` and the common layers `paired.shared`.

    Attributes:
        blocks: Number of adapted blocks of each tower, the last ones; at most the number that both have.
        hidden: Width of the common layers.
        scale: Factor of what an adapter adds to the tokens. As in the released code, the gradient of the
            adapters' parameters is computed without it.
    """

    offers: ClassVar[frozenset[str]] = frozenset({"paired adapters"})

    blocks: Count = 8
    hidden: Count = 32
    scale: Positive = 0.001

    def apply(self, model: Backbone) -> Backbone:
        text = frozen_text_side(model)
        depths, widths = both_towers(model, text)
        count = min(self.blocks, *depths)
        with torch.device(model.head.weight.device):
            adapters = PairedAdapters(count, self.hidden, widths, depths, self.scale)
        pair(model, text, adapters)
        return model


TUNING = MultimodalAdapter
