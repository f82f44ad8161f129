"""Median: the coordinate-wise median of the clients' parameters, which a few wrong answers cannot move far.

Yin, Chen, Ramchandran, Bartlett, Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates,
ICML 2018 [yin2018median], Algorithm 1, option I. The paper takes the median of gradients at one point; here,
as in FedAvg, it is that of the parameters after local training. Clients are not weighted by their data.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from rayfed import Cohort, Method, Server, ServerState, Update
from rayfed.federation.params import by_name


@dataclass(frozen=True)
class MedianServer(Server):
    """Takes the median of every entry over the clients that hold it."""

    sent_tensors_only: ClassVar[bool] = True

    def aggregate(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> ServerState:
        middle = {name: median(torch.stack(values)) for name, values in by_name(updates).items()}
        return replace(state, params={**state.params, **middle})


def median(values: Tensor) -> Tensor:
    """Median over the first dimension; of an even number of values, the mean of the two in the middle.

    Args:
        values: Values of n clients, shape (n, ...).
    """
    ordered = values.sort(dim=0).values
    n = len(ordered)
    return ordered[n // 2] if n % 2 else (ordered[n // 2 - 1] + ordered[n // 2]) / 2


METHOD = Method(server=MedianServer, knob="it has no hyperparameter")
