"""Per-FedAvg: first-order MAML, so that the global model is a good start for one local step.

Fallah, Mokhtari, Ozdaglar, Personalized Federated Learning with Theoretical Guarantees, NeurIPS 2020
[fallah2020perfedavg], Algorithm 1, with first-order gradients, the two halves of each batch for the two
steps, and one learning rate. The first step is plain; the momentum of `train.momentum` is that of the second
one only. It is also the ablation "only ML" of FFT-GP.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from algorithms.bgp import MetaLocal
from rayfed import Broadcast, Client, Knob, Method, Update
from rayfed.types import NonNegative


@dataclass(frozen=True)
class FirstOrderMaml(MetaLocal):
    """First-order MAML at the client.

    Attributes:
        personal_steps: Number of ordinary training steps after which the trained model is scored as personal
            model; 0: the trained model itself is scored, as in FFT-GP.
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


METHOD = Method(local=FirstOrderMaml, knob=Knob("local.inner_lr", 0.001, 0.1))
