"""BitFit: the biases of the backbone and the head are trained and sent.

Ben Zaken et al., BitFit: Simple Parameter-efficient Fine-tuning for Transformer-based Masked
Language-models, ACL 2022 [benzaken2022bitfit], section 3.
"""

from dataclasses import dataclass
from typing import ClassVar

from rayfed.errors import ConfigError
from rayfed.models.backbone import Backbone
from rayfed.tuning.base import freeze


@dataclass(frozen=True)
class BitFit:
    """Train the biases of the backbone and the head; everything else is frozen.

    Attributes:
        train_head: Whether the head is trained too.
    """

    train_head: bool = True

    offers: ClassVar[frozenset[str]] = frozenset()

    def apply(self, model: Backbone) -> Backbone:
        freeze(model, self.train_head)
        biases = [p for name, p in model.net.named_parameters() if name.endswith((".bias", "_bias"))]
        if not biases:
            raise ConfigError(f"tuning.name: {model.label!r} has no biases to train; set tuning=lora or head")
        for bias in biases:
            bias.requires_grad_(True)
        return model


TUNING = BitFit
