"""CLIP-Adapter: a small network whose output is mixed with the features of a frozen model.

Gao et al., CLIP-Adapter: Better Vision-Language Models with Feature Adapters, IJCV 2024 [gao2024clipadapter],
Eq. 5 and 6:
ratio * MLP(f) + (1 - ratio) * f, with two linear layers without bias and a ReLU after each.

Differs from the paper: the hidden width is a multiple of the feature width instead of a quarter of it; the
default gives 0.5 million parameters at width 512, as in FFT-GP
[zhang2024fftgp], Figure 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rayfed.models.backbone import Backbone
from rayfed.tuning.base import freeze
from rayfed.types import Fraction, Positive


class ResidualAdapter(nn.Module):
    """Maps features (B, width) to features of the same shape.

    Args:
        hidden: Hidden width of the network.
        ratio: Share of the network's output in the sum, in [0, 1].
    """

    def __init__(self, width: int, hidden: int, ratio: float) -> None:
        super().__init__()
        self.ratio = ratio
        self.inner = nn.Linear(width, hidden, bias=False)
        self.outer = nn.Linear(hidden, width, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        changed = torch.relu(self.outer(torch.relu(self.inner(features))))
        return self.ratio * changed + (1 - self.ratio) * features


@dataclass(frozen=True, kw_only=True)
class ClipAdapter:
    """Train the adapter; on a model without text tower also the head.

    Attributes:
        multiplier: Hidden width of the adapter as a multiple of the feature width.
        ratio: Share of the adapter's output in the sum; 0 leaves the features as they are.
    """

    offers: ClassVar[frozenset[str]] = frozenset({"adapter"})

    multiplier: Positive = 1.0
    ratio: Fraction = 0.2

    def apply(self, model: Backbone) -> Backbone:
        freeze(model, train_head=model.text is None)
        hidden = max(1, round(self.multiplier * model.width))
        with torch.device(model.head.weight.device):
            model.adapter = ResidualAdapter(model.width, hidden, self.ratio)
        return model


TUNING = ClipAdapter
