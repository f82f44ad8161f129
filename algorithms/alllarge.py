"""AllLarge: everybody holds all blocks, whatever `capacity` says; the ceiling in FedRA's tables."""

from dataclasses import dataclass

from algorithms._blocks import Blocks, BlockServer
from rayfed.federation.cohort import Cohort
from rayfed.federation.method import Method
from rayfed.types import ServerState


@dataclass(frozen=True)
class AllLarge(BlockServer):
    """FedAvg of the whole model."""

    def allocate(self, state: ServerState, cohort: Cohort) -> Blocks:
        return dict.fromkeys(cohort.ids, tuple(range(cohort.depth)))


METHOD = Method(server=AllLarge)
