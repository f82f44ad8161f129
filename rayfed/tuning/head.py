"""Linear probing: only the head is trained and sent.

Radford et al. [radford2021clip], section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rayfed.models.backbone import Backbone
from rayfed.tuning.base import freeze


@dataclass(frozen=True)
class Head:
    """Train the head of a frozen backbone."""

    offers: ClassVar[frozenset[str]] = frozenset()

    def apply(self, model: Backbone) -> Backbone:
        freeze(model)
        return model


TUNING = Head
