"""Per-FedAvg: a start point that is good after one step; also FFT-GP's ablation "only ML".

Fallah, Mokhtari, Ozdaglar, Personalized Federated Learning with Theoretical Guarantees, NeurIPS 2020,
Algorithm 1, with first-order gradients, the two halves of each batch and one learning rate.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from algorithms.bgp import MetaLocal
from rayfed.federation.client import Client
from rayfed.federation.method import Method
from rayfed.types import Broadcast, NonNegative, Update


@dataclass(frozen=True)
class StartPoint(MetaLocal):
    """First-order MAML at the client.

    Attributes:
        personal_steps: Ordinary steps from the trained model to the one that is scored as personal; FFT-GP
            scores the trained model itself.
    """

    align_weight: NonNegative = 0.0
    meta_update: Literal["sequential", "fo_restore", "second_order", "none"] = "fo_restore"
    meta_batch: Literal["fresh", "half"] = "half"
    personal_steps: Annotated[int, Ge(0)] = 0

    def personalize(self, client: Client, sent: Broadcast, update: Update) -> None:
        super().personalize(client, sent, update)
        optimizer = client.optimizer()
        for _, batch in zip(range(self.personal_steps), client.batches(), strict=False):
            self.step(client, sent, batch, optimizer)


METHOD = Method(local=StartPoint)
