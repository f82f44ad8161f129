"""A network that makes the context of the class prompts from the names of the classes.

Qiu et al., Federated Text-driven Prompt Generation for Vision-Language Models, ICLR 2024 [qiu2024fedtpg], as
in the released code with its defaults (`MODEL.DEPTH` 0, `MODEL.D_CTX` 1): learned queries attend to features
of the names, after a normalization of both; what they get goes through a GEGLU layer, to whose output it is
added. The network knows no class, so that it can be used for other names.

The features are those of the class prompts of `model.template`; with `{}`, which `algorithm=fedtpg` sets,
those of the names alone, as in the released code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rayfed.errors import ConfigError
from rayfed.models.backbone import Backbone
from rayfed.models.prompters import PromptNetwork
from rayfed.tuning.text_prompt import TextPrompt, check_common
from rayfed.types import Count


@dataclass(frozen=True, kw_only=True)
class NetworkPrompt(TextPrompt):
    """Train M queries, the parameter `text.context`, and the network, `text.prompter`.

    Attributes:
        heads: Heads of the attention, a divisor of the size of a token's embedding.
    """

    offers: ClassVar[frozenset[str]] = frozenset({"text features", "prompts by name"})

    length: Count = 4
    heads: Count = 4

    def apply(self, model: Backbone) -> Backbone:
        super().apply(model)
        text = check_common(model, self.class_specific, "prompt_network")
        if text.token_width % self.heads:
            raise ConfigError(f"tuning.heads: {self.heads} is no divisor of {text.token_width}; set another")
        with torch.device(model.head.weight.device):
            text.prompter = PromptNetwork(model.width, text.token_width, self.heads)
        return model


TUNING = NetworkPrompt
