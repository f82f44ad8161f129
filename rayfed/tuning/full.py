"""Full fine-tuning: every parameter trains and travels."""

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
        return model


TUNING = Full
