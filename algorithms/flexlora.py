"""FlexLoRA: splits the mean product of the LoRA adapters into factors again, by singular values.

Bai et al., Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources,
NeurIPS 2024 [bai2024flexlora], as the baseline of LoRA-FAIR [bian2025lorafair]. The largest singular values
come first, so that a client of rank k (`capacity.rank`), which receives the first k components, gets the
best approximation of its rank.

Differs from the paper: components with singular value 0 keep their row of A, so that they can be trained.
"""

from dataclasses import dataclass
from typing import ClassVar

from rayfed import Method, Server
from rayfed.federation.aggregation import LoraRule


@dataclass(frozen=True)
class FlexLora(Server):
    """Server that approximates the mean product by factors of the rank of the tuning.

    Attributes:
        lora_agg: How LoRA factors are combined.
    """

    lora_agg: LoraRule = "product_svd"

    needs: ClassVar[frozenset[str]] = frozenset({"lora"})


METHOD = Method(server=FlexLora, knob="it has no hyperparameter")
