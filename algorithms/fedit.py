"""FedIT: FedAvg of LoRA adapters, in which A and B are averaged separately.

Zhang et al., Towards Building the FederatedGPT: Federated Instruction Tuning, ICASSP 2024 [zhang2024fedit],
as the baseline of LoRA-FAIR [bian2025lorafair]. It is FedAvg with `tuning=lora`, and refuses another
tuning. The mean of the factors is not the mean of their products (`rayfed.federation.aggregation`).
"""

from dataclasses import dataclass
from typing import ClassVar

from rayfed import Method, Server


@dataclass(frozen=True)
class FedIT(Server):
    """Server that averages the factors of LoRA adapters."""

    needs: ClassVar[frozenset[str]] = frozenset({"lora"})


METHOD = Method(server=FedIT, knob="it has no hyperparameter")
