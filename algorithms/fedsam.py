"""FedSAM: FedAvg with sharpness-aware local training.

Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022 [qu2022fedsam],
Algorithm 1 (FedSAM).
"""

from dataclasses import dataclass

from algorithms._sharpness import PerturbedLocal
from rayfed import Knob, Method
from rayfed.types import NonNegative


@dataclass(frozen=True)
class SharpnessAware(PerturbedLocal):
    """Local steps with the gradient at the approximately worst weights within an L2 ball.

    Attributes:
        rho: Radius of the ball; 0 gives FedAvg.
    """

    rho: NonNegative = 0.05

    @property
    def radius(self) -> float:
        return self.rho


METHOD = Method(local=SharpnessAware, knob=Knob("local.rho", 0.01, 0.5))
