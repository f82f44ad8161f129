"""Server optimizers with an adaptive step for each parameter: FedAdam, FedYogi and FedAdagrad.

Reddi et al., Adaptive Federated Optimization, ICLR 2021 [reddi2021fedadam], Algorithm 2: they differ in the
second moment only. As there, moments have no bias correction, and v is initialized with tau^2.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayfed import Server
from rayfed.types import Decay, Positive


@dataclass(frozen=True)
class AdaptiveServer(Server):
    """Averages as FedAvg does, and takes an adaptive step along the difference to the old parameters.

    Attributes:
        lr: Step size eta.
        beta1: Decay of the first moment m.
        tau: Added to the square root of v; with large values the step depends less on v.
    """

    lr: Positive = 0.01
    beta1: Decay = 0.9
    tau: Positive = 1e-3

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """The next v, from v and the squared difference of this round."""
        raise NotImplementedError

    def take_step(self, old: Tensor, mean: Tensor, memory: dict[str, Any]) -> Tensor:
        delta = mean - old
        m = memory.get("m", torch.zeros_like(old))
        v = memory.get("v", torch.full_like(old, self.tau**2))
        memory["m"] = self.beta1 * m + (1 - self.beta1) * delta
        memory["v"] = self.second_moment(v, delta**2)
        return old + self.lr * memory["m"] / (memory["v"].sqrt() + self.tau)
