"""FedYogi: as FedAdam, with Yogi's second moment, which changes by bounded amounts.

Reddi et al., Adaptive Federated Optimization, ICLR 2021 [reddi2021fedadam], Algorithm 2.
`server.weighting=uniform` is the mean of the paper.
"""

from dataclasses import dataclass

from torch import Tensor

from algorithms._adaptive import AdaptiveServer
from rayfed import Knob, Method
from rayfed.types import Decay


@dataclass(frozen=True)
class FedYogi(AdaptiveServer):
    """Server whose second moment moves towards the squares by a share of their size.

    Attributes:
        beta2: Decay of the second moment v.
    """

    beta2: Decay = 0.99

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * (v - square).sign()


METHOD = Method(server=FedYogi, knob=Knob("server.lr", 0.003, 0.3))
