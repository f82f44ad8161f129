"""Trimmed mean: the mean of every entry without its largest and smallest values.

Yin, Chen, Ramchandran, Bartlett, Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates,
ICML 2018 [yin2018median], Algorithm 1, option II. The paper takes it of gradients at one point; here, as in
FedAvg, it is that of the parameters after local training. Clients are not weighted by their data.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from rayfed import Cohort, Knob, Method, Server, ServerState, Update
from rayfed.federation.params import by_name


@dataclass(frozen=True)
class TrimmedMeanServer(Server):
    """Leaves out a share of the values of every entry at each end.

    Attributes:
        beta: Share that is left out at each end; of n clients floor(beta x n). 0 gives the unweighted mean.
    """

    beta: Annotated[float, Ge(0), Lt(0.5)] = 0.1

    sent_tensors_only: ClassVar[bool] = True

    def aggregate(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> ServerState:
        mean = {
            name: trimmed_mean(torch.stack(values), self.beta) for name, values in by_name(updates).items()
        }
        return replace(state, params={**state.params, **mean})


def trimmed_mean(values: Tensor, beta: float) -> Tensor:
    """Mean over the first dimension without the floor(beta x n) largest and smallest values of each entry.

    Args:
        values: Values of n clients, shape (n, ...).
        beta: Share that is left out at each end, in [0, 0.5).
    """
    cut = int(beta * len(values) + 1e-9)
    return values.sort(dim=0).values[cut : len(values) - cut].mean(dim=0)


METHOD = Method(server=TrimmedMeanServer, knob=Knob("server.beta", 0.05, 0.4))
