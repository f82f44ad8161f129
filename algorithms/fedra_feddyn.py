"""FedRA with FedDyn: random allocation with dynamic regularization of each block.

Su, Li, Xue, FedRA, ECCV 2024 [su2024fedra], section 4.4, and Acar et al. [acar2021feddyn], Algorithm 1.
"""

from dataclasses import dataclass

from algorithms.feddyn import DynamicRegularization
from algorithms.fedra import RandomAllocation
from rayfed import Knob, Method
from rayfed.types import NonNegative


@dataclass(frozen=True)
class DynamicAllocation(RandomAllocation):
    """Random allocation with FedDyn's server correction and a uniform mean over holders."""

    feddyn_alpha: NonNegative = 0.1


METHOD = Method(
    server=DynamicAllocation, local=DynamicRegularization, knob=Knob("server.feddyn_alpha", 0.01, 1.0)
)
