"""Bottleneck adapters: two small linear layers with a skip connection in halves of every block, and the head.

Houlsby et al., Parameter-Efficient Transfer Learning for NLP, ICML 2019 [houlsby2019adapter], section 2.1:
h + W_up GELU(W_down h + b_down) + b_up, after the projection of the attention and after the MLP, before their
results are added to the residual stream. `style=pfeiffer` has the one after the MLP only, as Pfeiffer et al.,
AdapterFusion, EACL 2021 [pfeiffer2021adapterfusion], section 3.2.2.

Differs from the papers: W_up and both biases start as zero, so that the tuned model first computes what the
frozen one does (there, nearly); the norms of the network stay frozen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.models.backbone import Backbone
from rayfed.tuning.base import freeze
from rayfed.tuning.sites import LAST, chosen_layers, named_layers
from rayfed.types import Count, NonNegative

STYLES = {"houlsby": ("l0", "l1"), "pfeiffer": ("l1",)}
"""Halves of a block that get an adapter; see `rayfed.tuning.sites.LAST`."""


class Bottleneck(nn.Module):
    """Maps the output of a layer, shape (..., width), to the same shape.

    Args:
        width: Width of the layer's output.
        hidden: Width of the bottleneck.
        std: Standard deviation of the start values of the first layer.
    """

    def __init__(self, width: int, hidden: int, std: float) -> None:
        super().__init__()
        self.down = nn.Linear(width, hidden)
        self.up = nn.Linear(hidden, width)
        nn.init.normal_(self.down.weight, std=std)
        for start_at_zero in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(start_at_zero)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(F.gelu(self.down(x)))


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Train bottleneck adapters.

    Attributes:
        bottleneck: Width of the bottleneck.
        style: `houlsby`: an adapter after each half of a block; `pfeiffer`: after the MLP only. In a mixer
            the first half mixes tokens, and its adapter works on the tokens of a channel. CLIP models of
            open_clip have the second half only, with either style.
        init_std: Standard deviation of the start values of W_down, normally distributed; 0.01 in the paper.
        targets: Any linear layers of the network in place of those of `style`, as of `tuning=lora`.
        train_head: Whether the head is trained too.
    """

    offers: ClassVar[frozenset[str]] = frozenset()

    bottleneck: Count = 8
    style: Literal["houlsby", "pfeiffer"] = "houlsby"
    init_std: NonNegative = 0.01
    targets: str | tuple[str, ...] | None = None
    train_head: bool = True

    def apply(self, model: Backbone) -> Backbone:
        layers = self._layers(model)
        freeze(model, self.train_head)
        with torch.device(model.head.weight.device):
            for layer in layers:
                layer.adapter = Bottleneck(layer.out_features, self.bottleneck, self.init_std)
                layer.register_forward_hook(_add_adapter)
        return model

    def _layers(self, model: Backbone) -> list[Any]:
        if self.targets is not None:
            return [model.net.get_submodule(n) for n in named_layers(model, self.targets, (nn.Linear,))]
        names = chosen_layers(model, STYLES[self.style], LAST)
        return [block.get_submodule(name) for block in model.stack.children() for name in names]


def _add_adapter(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    adapted: Tensor = layer.adapter(output)
    return adapted


TUNING = Adapter
