"""FedAdam: Adam on the server, with the mean update of the clients in place of the gradient.

Reddi et al., Adaptive Federated Optimization, ICLR 2021 [reddi2021fedadam], Algorithm 2.
`server.weighting=uniform` is the mean of the paper.
"""

from dataclasses import dataclass

from torch import Tensor

from algorithms._adaptive import AdaptiveServer
from rayfed import Knob, Method
from rayfed.types import Decay


@dataclass(frozen=True)
class FedAdam(AdaptiveServer):
    """Server whose second moment is a decaying mean of squares.

    Attributes:
        beta2: Decay of the second moment v.
    """

    beta2: Decay = 0.99

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


METHOD = Method(server=FedAdam, knob=Knob("server.lr", 0.003, 0.3))
