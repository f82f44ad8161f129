"""FedProx: FedAvg with a proximal term in the local loss.

Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020 [li2020fedprox], Eq. 2. `form=norm`
uses the distance instead of its square, as in the code of FedCLIP's authors.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rayfed import Broadcast, Client, Knob, Local, Method
from rayfed.federation.local import pure
from rayfed.federation.params import sq_distance
from rayfed.types import Batch, NonNegative


@dataclass(frozen=True)
class FedProx(Local):
    """Local loss plus mu / 2 times the squared distance to the received parameters.

    Attributes:
        mu: Weight of the proximal term; 0 gives FedAvg.
        form: `squared`: squared L2 distance (the paper); `norm`: L2 distance.
    """

    mu: NonNegative = 0.01
    form: Literal["squared", "norm"] = "squared"

    @pure
    def loss(self, client: Client, sent: Broadcast, batch: Batch) -> Tensor:
        distance = sq_distance(client.trainable(), sent.params)
        if self.form == "norm":
            distance = distance.clamp_min(1e-24).sqrt()  # the root has no gradient at 0, where a round begins
        return super().loss(client, sent, batch) + self.mu / 2 * distance


METHOD = Method(local=FedProx, knob=Knob("local.mu", 0.001, 1.0))
