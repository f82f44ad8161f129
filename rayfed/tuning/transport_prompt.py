"""Two prompts for each class, matched with the patches of an image by unbalanced optimal transport.

Li et al., Global and Local Prompts Cooperation via Optimal Transport for Federated Learning, CVPR 2024
[li2024fedotp], from its abstract and released code. `algorithm=fedotp` keeps the second prompt at the client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt, Le

from rayfed.errors import ConfigError
from rayfed.models.backbone import Backbone
from rayfed.models.clip import ImageTower
from rayfed.models.prompters import SecondContext
from rayfed.models.transport import TransportHead
from rayfed.tuning.text_prompt import TextPrompt, check_common
from rayfed.types import Count, Positive


@dataclass(frozen=True, kw_only=True)
class TransportPrompt(TextPrompt):
    """Train two contexts, `text.context` and `text.prompter.own`, both with start values of their own.

    Attributes:
        gamma: Share of the patches that is matched with the prompts; 1: each patch has the same mass.
        entropy: Weight of the entropy of the transport plan, whose cost is 1 - cosine.
        steps: Steps in which the plan is computed.
    """

    offers: ClassVar[frozenset[str]] = frozenset({"two prompts"})

    gamma: Annotated[float, Gt(0), Le(1)] = 0.8
    entropy: Positive = 0.1
    steps: Count = 100

    def apply(self, model: Backbone) -> Backbone:
        super().apply(model)
        text = check_common(model, self.class_specific, "transport_prompt")
        if not (isinstance(model.net, ImageTower) and model.net.add_patches()):
            raise ConfigError(
                f"tuning.name: transport_prompt needs an image tower with patches and a class token, which "
                f"{model.label!r} does not have; use clip_mini or clip_vit_b_16"
            )
        with torch.device(model.head.weight.device):
            text.prompter = SecondContext(self.length, text.token_width, self.init_std)
            model.head = TransportHead(model.head, self.gamma, self.entropy, self.steps)  # type: ignore[arg-type]
        return model


TUNING = TransportPrompt
