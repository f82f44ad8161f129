"""FedAdagrad: as FedAdam, with the sum of all squares as the second moment.

Reddi et al., Adaptive Federated Optimization, ICLR 2021 [reddi2021fedadam], Algorithm 2.
`server.weighting=uniform` is the mean of the paper.
"""

from dataclasses import dataclass

from torch import Tensor

from algorithms._adaptive import AdaptiveServer
from rayfed import Knob, Method
from rayfed.types import Decay


@dataclass(frozen=True)
class FedAdagrad(AdaptiveServer):
    """Server whose second moment is the sum of the squares of all rounds.

    Attributes:
        beta1: Decay of the first moment m; 0: the step is along the difference of the round, as in Adagrad.
    """

    beta1: Decay = 0.0

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


METHOD = Method(server=FedAdagrad, knob=Knob("server.lr", 0.003, 0.3))
