"""AttAI: the features of a frozen model, multiplied by attention weights over their dimensions.

Lu, Hu, Wang, Xie, FedCLIP, IEEE Data Engineering Bulletin 2023 [lu2023fedclip], Eq. 5 and 6: linear layer,
tanh, linear layer, softmax over the dimensions. Uniform attention does not change the scores of a CLIP model,
because these depend on directions only.
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
    """Multiplies features (B, width) by their attention weights; PyTorch's default initialization."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)

    def attention(self, features: Tensor) -> Tensor:
        """Attention weights of the dimensions, positive, shape (B, width); each row sums to 1."""
        return torch.softmax(self.outer(torch.tanh(self.inner(features))), dim=-1)

    def forward(self, features: Tensor) -> Tensor:
        return self.attention(features) * features


@dataclass(frozen=True, kw_only=True)
class AttAI:
    """Train an attention adapter; on a model without text tower also the head.

    Attributes:
        text_side: Train a second adapter, on the text features.
        towers: Train and send the network too; of a CLIP model both towers (the paper's Figure 3b).
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
