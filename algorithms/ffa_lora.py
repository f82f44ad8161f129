"""FFA-LoRA: A of every LoRA adapter keeps its common start value, only B is trained and sent.

Sun et al., Improving LoRA in Privacy-preserving Federated Learning, ICLR 2024 [sun2024ffalora], as in Guo
et al. [guo2025fedsalora], Figure 1. With one A the mean of the products B A is the product of the mean of
B, exactly. Half as many bytes are sent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rayfed import Local, Method


@dataclass(frozen=True)
class FfaLora(Local):
    """Local training of B only."""

    needs: ClassVar[frozenset[str]] = frozenset({"lora"})
    tuning: ClassVar[Mapping[str, object]] = {"freeze_a": True}


METHOD = Method(local=FfaLora, knob="it has no hyperparameter")
