"""SSF: the output of every layer is scaled and shifted by trained vectors, and the head is trained.

Lian et al., Scaling & Shifting Your Features, NeurIPS 2022 [lian2022ssf], section 3.2: y = gamma * x + beta
after every linear layer, convolution and LayerNorm, with a vector of one number for each channel.

Differs from the paper: gamma starts as 1 and beta as 0 instead of near them, so that the tuned model first
computes what the frozen one does. BatchNorm gets no pair: frozen, it is affine, so the pair of the
convolution before it has the same effect. The vectors are never merged into the frozen weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rayfed.errors import ConfigError
from rayfed.models.backbone import Backbone
from rayfed.tuning.base import freeze
from rayfed.tuning.sites import called_layers


@dataclass(frozen=True, kw_only=True)
class ScaleShift:
    """Train a scale and a shift after every layer.

    Attributes:
        train_head: Whether the head is trained too.
    """

    offers: ClassVar[frozenset[str]] = frozenset()

    train_head: bool = True

    def apply(self, model: Backbone) -> Backbone:
        layers = called_layers(model.net, (nn.Linear, nn.Conv2d, nn.LayerNorm))
        if not layers:
            raise ConfigError(
                f"tuning.name: {model.label!r} has no linear layer, convolution or LayerNorm to scale and "
                f"shift; set tuning=full or head"
            )
        freeze(model, self.train_head)
        for layer in layers.values():
            _add_pair(layer)
        return model


def _add_pair(layer: Any) -> None:
    """Register gamma = 1 and beta = 0, shape (width,), or (width, 1, 1) where the output is an image."""
    from timm.layers.norm import LayerNorm2d

    is_image = isinstance(layer, nn.Conv2d | LayerNorm2d)
    shape = (len(layer.weight), 1, 1) if is_image else (len(layer.weight),)
    place = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    layer.scale = nn.Parameter(torch.ones(shape, **place))
    layer.shift = nn.Parameter(torch.zeros(shape, **place))
    layer.register_forward_hook(_scale)


def _scale(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    scaled: Tensor = output * layer.scale + layer.shift
    return scaled


TUNING = ScaleShift
