"""Linear probing: only the head is trained and sent.

Radford et al. [radford2021clip], section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rayfed.errors import ConfigError
from rayfed.models.backbone import Backbone
from rayfed.tuning.base import freeze


@dataclass(frozen=True)
class Head:
    """Train the head of a frozen backbone."""

    offers: ClassVar[frozenset[str]] = frozenset()

    def apply(self, model: Backbone) -> Backbone:
        if not model.has_new_head:
            raise ConfigError(
                f"tuning.name: 'head' trains a new head, and that of the language model {model.label!r} is "
                f"pre-trained; set tuning=lora, bitfit or full"
            )
        freeze(model)
        return model


TUNING = Head
