"""FedEx-LoRA: averages A and B, and adds the remaining error of the mean product to the frozen weights.

Singhal, Ponkshe, Vepakomma, FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of
Foundation Models, 2024 [singhal2024fedexlora], as the released code. The residual is the mean of the
products B A minus the product of the means of B and A, so that the model of the next round is the exact
mean.

Differs from the paper: the residuals of all rounds are sent as one matrix for each layer, so that a client
that was absent misses nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rayfed import Method, Server
from rayfed.federation.aggregation import LoraRule


@dataclass(frozen=True)
class FedExLora(Server):
    """Server that averages the factors, and keeps the difference to the mean product in the residual.

    Attributes:
        lora_agg: How LoRA factors are combined.
    """

    lora_agg: LoraRule = "residual"

    needs: ClassVar[frozenset[str]] = frozenset({"lora"})
    tuning: ClassVar[Mapping[str, object]] = {"residual": True}


METHOD = Method(server=FedExLora, knob="it has no hyperparameter")
