"""AllSmall: FedAvg of a model with only as many blocks as the smallest client can hold.

Su, Li, Xue, FedRA, ECCV 2024 [su2024fedra], section 4.1.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from algorithms._blocks import Blocks, BlockServer
from rayfed import Cohort, Local, Method, ServerState
from rayfed.errors import ConfigError
from rayfed.types import Count


@dataclass(frozen=True)
class AllSmall(BlockServer):
    """Server whose global model consists of the first blocks, the final norm and the head.

    Attributes:
        depth: Number of blocks of the global model; none: the smallest capacity of all clients, or of the
            clients of the first round where capacities are drawn in each round.
    """

    depth: Count | None = None

    sent_tensors_only: ClassVar[bool] = True

    def round(self, state: ServerState, cohort: Cohort, local: Local) -> ServerState:
        if state.blocks is None:
            depth = min(cohort.capacity.values()) if self.depth is None else self.depth
            if depth > cohort.depth:
                raise ConfigError(
                    f"server.depth: {depth} is more than the {cohort.depth} blocks of the model"
                )
            state = replace(state, blocks=tuple(range(depth)))
        return super().round(state, cohort, local)

    def allocate(self, state: ServerState, cohort: Cohort) -> Blocks:
        return dict.fromkeys(cohort.ids, state.blocks or ())


METHOD = Method(server=AllSmall, knob="which blocks a client holds has no strength")
