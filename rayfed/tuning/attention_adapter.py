"""AttAI: a gate on the features of a frozen model, made of attention over their dimensions.

Lu et al., FedCLIP: Fast Generalization and Personalization for CLIP in Federated Learning, IEEE Data
Engineering Bulletin 2023, Eq. 5 and 6. Linear, tanh, linear, softmax over the dimensions; the feature is
multiplied by it. Uniform attention leaves the scores of a CLIP model as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rayfed.errors import ConfigError
from rayfed.models.backbone import Backbone
from rayfed.tuning.base import freeze
from rayfed.tuning.full import Full


class AttentionAdapter(nn.Module):
    """Features (B, width) times their attention, with PyTorch's default initialisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def attention(self, features: Tensor) -> Tensor:
        """Positive weights of the dimensions, shape (B, width), rows summing to 1."""
        return torch.softmax(self.outer(torch.tanh(self.inner(features))), dim=-1)

    def forward(self, features: Tensor) -> Tensor:
        return self.attention(features) * features


@dataclass(frozen=True, kw_only=True)
class AttAI:
    """The gate; on a model without text tower also the head.

    Attributes:
        text_side: A second gate, on the text features.
        towers: The network trains and travels too, of a CLIP model both towers (the paper's Figure 3b).
    """

    offers: ClassVar[frozenset[str]] = frozenset({"adapter"})

    text_side: bool = False
    towers: bool = False

    def apply(self, model: Backbone) -> Backbone:
        if self.towers:
            Full().apply(model)
        else:
            freeze(model, train_head=model.text is None)
        with torch.device(model.head.weight.device):
            model.adapter = AttentionAdapter(model.width)
            if self.text_side:
                if model.text is None:
                    raise ConfigError(
                        f"tuning.text_side: {model.label!r} has no text tower; use clip_mini or "
                        f"open_clip/<name>"
                    )
                model.text.adapter = AttentionAdapter(model.width)
        return model


TUNING = AttAI
