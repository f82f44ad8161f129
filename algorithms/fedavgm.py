"""FedAvgM: FedAvg with momentum on the server.

Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019
[hsu2019fedavgm], section 4.2. Differs from the experiments of the paper, which use Nesterov's momentum: the
momentum is that of the text.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayfed import Knob, Method, Server
from rayfed.types import Decay, Positive


@dataclass(frozen=True)
class FedAvgM(Server):
    """Averages as FedAvg does, and moves along a decaying sum of the differences to the old parameters.

    Attributes:
        lr: Step size; with 1 and without momentum the new parameters are the mean of the clients' parameters.
        beta: Decay of the momentum v.
    """

    lr: Positive = 1.0
    beta: Decay = 0.9

    def take_step(self, old: Tensor, mean: Tensor, memory: dict[str, Any]) -> Tensor:
        v = memory.get("v", torch.zeros_like(old))
        memory["v"] = self.beta * v + mean - old
        return old + self.lr * memory["v"]


METHOD = Method(server=FedAvgM, knob=Knob("server.beta", 0.5, 0.97))
