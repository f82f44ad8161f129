"""AllLarge: FedAvg in which all clients hold all blocks, whatever their capacity; upper bound for FedRA.

Su, Li, Xue, FedRA, ECCV 2024 [su2024fedra], section 4.1.
"""

from dataclasses import dataclass
from typing import ClassVar

from algorithms._blocks import Blocks, BlockServer
from rayfed import Cohort, Method, ServerState


@dataclass(frozen=True)
class AllLarge(BlockServer):
    """Server that gives every client all blocks."""

    sent_tensors_only: ClassVar[bool] = True

    def allocate(self, state: ServerState, cohort: Cohort) -> Blocks:
        return dict.fromkeys(cohort.ids, tuple(range(cohort.depth)))


METHOD = Method(server=AllLarge, knob="which blocks a client holds has no strength")
