"""MaPLe: learned tokens in the first blocks of both towers of a CLIP model, which linear layers connect.

Khattak et al., MaPLe: Multi-modal Prompt Learning, CVPR 2023 [khattak2023maple], from the part of its
released code that makes the prompts. A linear layer for each block maps the prompts of the text tower to
those of the image tower.

Differs from the released code: the first prompts begin with random values instead of the words "a photo of
a". Those of the image tower are appended right before its first block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rayfed.models.backbone import Backbone
from rayfed.models.paired import CoupledPrompts, both_towers, pair
from rayfed.tuning.text_prompt import frozen_text_side
from rayfed.types import Count, NonNegative


@dataclass(frozen=True, kw_only=True)
class Maple:
    """Train the prompts of the text tower, `paired.prompts`, and the linear layers, `paired.couplings`.

    Attributes:
        length: Number M of prompts in a block.
        depth: Number of blocks with their own prompts, from the first; at most the number that both towers
            have. The parameter `paired.prompts` has shape (depth, M, size of a token's embedding).
        init_std: Standard deviation of the normally distributed start values of the prompts.
    """

    offers: ClassVar[frozenset[str]] = frozenset({"text features"})

    length: Count = 2
    depth: Count = 9
    init_std: NonNegative = 0.02

    def apply(self, model: Backbone) -> Backbone:
        text = frozen_text_side(model, self.length)
        depths, widths = both_towers(model, text)
        with torch.device(model.head.weight.device):
            prompts = CoupledPrompts(min(self.depth, *depths), self.length, widths, self.init_std)
        pair(model, text, prompts)
        text.prompter = prompts
        return model


TUNING = Maple
