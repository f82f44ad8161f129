"""Full fine-tuning: every parameter trains and travels; of a CLIP model both towers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rayfed.models.backbone import Backbone


@dataclass(frozen=True)
class Full:
    """Nothing is frozen."""

    offers: ClassVar[frozenset[str]] = frozenset()

    def apply(self, model: Backbone) -> Backbone:
        model.requires_grad_(True)
        if model.text is not None:  # class features come from the tower; the scale of the cosines stays
            model.head.requires_grad_(False)
            model.text.tower.logit_scale.requires_grad_(False)
        return model


TUNING = Full
