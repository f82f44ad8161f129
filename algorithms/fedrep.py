"""FedRep: as FedPer, but each client trains its own head first, and then the common layers.

Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021
[collins2021fedrep], Algorithm 1. Clients are scored with their own heads.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from algorithms._partial import partial_step
from rayfed import Broadcast, Client, Knob, Local, Method, Update
from rayfed.types import Count


@dataclass(frozen=True)
class FedRep(Local):
    """Local training of what stays at the client, with the rest frozen, and then of the rest.

    Attributes:
        stays: Tensors that stay at the client.
        head_passes: How often the steps of a visit (`train.epochs`) are taken with the tensors that stay.
            They are taken once with the others.
    """

    head_passes: Count = 10
    stays: tuple[str, ...] = field(default=("head",), kw_only=True)

    grouped: ClassVar[bool] = True

    def train(self, client: Client, sent: Broadcast) -> Update:
        own = client.stays
        optimizer = client.optimizer()
        for _ in range(self.head_passes):
            for batch in client.batches():
                partial_step(self, client, sent, batch, optimizer, lambda name: name in own)
        for batch in client.batches():
            partial_step(self, client, sent, batch, optimizer, lambda name: name not in own)
        return client.update()


METHOD = Method(local=FedRep, knob=Knob("local.head_passes", 1, 15))
