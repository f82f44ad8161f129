"""FedProx: FedAvg with a proximal term in the local loss.

Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, Eq. 2. `form=norm` is the distance
itself instead of its square, as in the code of FedCLIP's authors.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rayfed.federation.client import Client
from rayfed.federation.local import Local
from rayfed.federation.method import Method
from rayfed.federation.params import sq_distance
from rayfed.types import Batch, Broadcast, NonNegative


@dataclass(frozen=True)
class FedProx(Local):
    """Local SGD that is pulled towards the broadcast parameters."""

    mu: NonNegative = 0.01  # 0 is FedAvg
    form: Literal["squared", "norm"] = "squared"

    def loss(self, client: Client, sent: Broadcast, batch: Batch) -> Tensor:
        pull = sq_distance(client.trainable(), sent.params)
        if self.form == "norm":
            pull = pull.clamp_min(1e-24).sqrt()  # at distance 0, where a round begins, it has no gradient
        return super().loss(client, sent, batch) + self.mu / 2 * pull


METHOD = Method(local=FedProx)
