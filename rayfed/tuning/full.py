"""Full fine-tuning: every parameter is trained and sent; of a CLIP model those of both towers.

McMahan et al. [mcmahan2017fedavg], Algorithm 1, train and average all parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rayfed.models.backbone import Backbone


@dataclass(frozen=True)
class Full:
    """Train all parameters, except the scale of a CLIP model's cosines."""

    offers: ClassVar[frozenset[str]] = frozenset()

    def apply(self, model: Backbone) -> Backbone:
        model.requires_grad_(True)
        if model.text is not None:  # the text tower computes the class features; their scale stays fixed
            model.head.requires_grad_(False)
            model.text.tower.logit_scale.requires_grad_(False)
        return model


TUNING = Full
