"""FedAvgM: FedAvg with momentum on the server.

Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019
[hsu2019fedavgm], section 4.2. Differs from the experiments of the paper, which use Nesterov's momentum: the
momentum is that of the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from rayfed import Cohort, Method, Server, ServerState, Update
from rayfed.types import Decay, Positive, is_statistic


@dataclass(frozen=True)
class FedAvgM(Server):
    """Averages as FedAvg does, and moves along a decaying sum of the differences to the old parameters.

    Attributes:
        lr: Step size; with 1 and without momentum the new parameters are the mean of the clients' parameters.
        beta: Decay of the momentum v.
    """

    lr: Positive = 1.0
    beta: Decay = 0.9

    uses_mean_only: ClassVar[bool] = True

    def aggregate(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> ServerState:
        averaged = super().aggregate(state, cohort, updates)
        params = dict(averaged.params)
        v = dict(state.memory.get("v", {}))
        for name in dict.fromkeys(name for update in updates for name in update.params):
            if is_statistic(name):
                continue  # a running mean or variance of BatchNorm stays the clients' mean
            old = state.params[name]
            v[name] = self.beta * v.get(name, torch.zeros_like(old)) + averaged.params[name] - old
            params[name] = old + self.lr * v[name]
        return replace(averaged, params=params).remember(v=v)


METHOD = Method(server=FedAvgM)
