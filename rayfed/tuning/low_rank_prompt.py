"""CoOp's context plus a product of two small matrices, which a method can keep at the client.

Cui et al., Harmonizing Generalization and Personalization in Federated Prompt Learning, ICML 2024
[cui2024fedpgp], from its abstract and released code. `algorithm=fedpgp` keeps the product at the client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge

from rayfed.models.backbone import Backbone
from rayfed.models.prompters import LowRankPart
from rayfed.tuning.text_prompt import TextPrompt, check_common


@dataclass(frozen=True, kw_only=True)
class LowRankPrompt(TextPrompt):
    """Train the context of the class prompts, and matrices U and V whose product is added to it.

    Attributes:
        rank: Number r of columns of U, the parameter `text.prompter.u` of shape (M, r), and of rows of V,
            `text.prompter.v` of shape (r, size of a token's embedding); 0: there are none, as with
            `tuning=text_prompt`. `init_std` is that of their start values, too.
    """

    offers: ClassVar[frozenset[str]] = frozenset({"text features", "low-rank prompt"})

    rank: Annotated[int, Ge(0)] = 4

    def apply(self, model: Backbone) -> Backbone:
        super().apply(model)
        text = check_common(model, self.class_specific, "low_rank_prompt")
        if self.rank:
            with torch.device(model.head.weight.device):
                text.prompter = LowRankPart(self.length, self.rank, text.token_width, self.init_std)
        return model


TUNING = LowRankPrompt
