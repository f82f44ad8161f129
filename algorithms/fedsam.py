"""FedSAM: FedAvg with sharpness-aware local training.

Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022, Algorithm 1 (FedSAM).
"""

from dataclasses import dataclass

from algorithms._sharpness import UphillLocal
from rayfed.federation.method import Method
from rayfed.types import NonNegative


@dataclass(frozen=True)
class SharpnessAware(UphillLocal):
    """Local steps with the gradient at the worst point of a small ball.

    Attributes:
        rho: Radius of the ball; 0 is FedAvg.
    """

    rho: NonNegative = 0.05

    @property
    def radius(self) -> float:
        return self.rho


METHOD = Method(local=SharpnessAware)
