"""FLoRA: the mean product of the LoRA adapters is added to the frozen weights, and adapters begin anew.

Wang et al., FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations,
NeurIPS 2024 [wang2024flora], as the baseline of LoRA-FAIR [bian2025lorafair]. Stacking the clients' factors
gives exactly the weighted mean of their products, also where their ranks differ (`capacity.rank`).

Differs from the paper: clients receive the sum of all mean products so far as one matrix for each layer
instead of the stacked factors of a round, so that a client that was absent misses nothing; and an adapter
begins anew with B = 0 and its first A, instead of an A drawn in every round.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rayfed import Method, Server
from rayfed.federation.aggregation import LoraRule


@dataclass(frozen=True)
class Flora(Server):
    """Server that adds the mean product to the residual of the layer, and sets B to 0.

    Attributes:
        lora_agg: How LoRA factors are combined.
    """

    lora_agg: LoraRule = "stack_merge"

    needs: ClassVar[frozenset[str]] = frozenset({"lora"})
    tuning: ClassVar[Mapping[str, object]] = {"residual": True}


METHOD = Method(server=Flora, knob="it has no hyperparameter")
