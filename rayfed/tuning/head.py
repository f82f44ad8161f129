"""Linear probing: only the head trains and travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rayfed.models.backbone import Backbone
from rayfed.tuning.base import freeze


@dataclass(frozen=True)
class Head:
    """The backbone is frozen."""

    offers: ClassVar[frozenset[str]] = frozenset()

    def apply(self, model: Backbone) -> Backbone:
        freeze(model)
        return model


TUNING = Head
