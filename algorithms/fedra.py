"""FedRA: each client trains a random subset of the blocks; a block is averaged over its holders.

Su, Li, Xue, FedRA: A Random Allocation Strategy for Federated Tuning to Unleash the Power of Heterogeneous
Clients, ECCV 2024 [su2024fedra], section 3.5, Eq. 3 and 4.

LoRA factors are averaged separately, as in the paper; this is not the mean of their products
(`rayfed.federation.aggregation`).

Differs from the paper: Eq. 4 is sampled exactly, over the clients of the round. Differs from the released
code: frozen norms are not uploaded, and the mean is weighted by data (`server.weighting=uniform` as in the
code).
"""

import logging
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from algorithms._allocation import (
    Infeasible,
    Matrix,
    check_depths,
    draw_allocation,
    draw_disjoint,
    draw_independent,
)
from algorithms._blocks import Blocks, BlockServer
from rayfed import Cohort, Method, ServerState
from rayfed.errors import ConfigError
from rayfed.seeds import generator

__all__ = ["METHOD", "RandomAllocation", "draw_allocation"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RandomAllocation(BlockServer):
    """Server that draws an allocation matrix for the clients of each round.

    Attributes:
        cover: On (Eq. 4): every block has a holder in every round. Off (Eq. 3): a block without a holder
            keeps its value.
        on_infeasible: With `cover`, what to do where the clients of a round together hold fewer blocks than
            the model has: cover as many as possible (cover_max), draw as without `cover` (eq3), or stop the
            run (error).
        prefer_stale: With cover_max, choose the blocks that were trained longest ago.
    """

    frozen_cache: Literal["none", "lru", "all", "preinstalled"] = "none"
    cover: bool = False
    on_infeasible: Infeasible = "cover_max"
    prefer_stale: bool = False

    sent_tensors_only: ClassVar[bool] = True

    def allocate(self, state: ServerState, cohort: Cohort) -> Blocks:
        depths = [cohort.capacity[cid] for cid in cohort.ids]
        rng = generator(cohort.seed, "fedra", cohort.round)
        last = state.memory.get("last_round", [-1] * cohort.depth)
        matrix = self._draw(depths, cohort.depth, rng, last)
        held = (tuple(np.flatnonzero(row).tolist()) for row in matrix)
        return dict(zip(cohort.ids, held, strict=True))

    def _draw(self, depths: list[int], depth: int, rng: np.random.Generator, last: list[int]) -> Matrix:
        if not self.cover or sum(depths) >= depth:
            return draw_allocation(depths, depth, rng, self.cover)
        if self.on_infeasible == "error":
            raise ConfigError(
                f"server.on_infeasible=error: the clients of the round hold {sum(depths)} blocks and "
                f"cannot cover {depth}; raise capacity or clients_per_round, or choose cover_max or eq3"
            )
        log.warning(
            "the clients of the round hold %d blocks and cannot cover %d, so some blocks are not trained "
            "in it; raise capacity or clients_per_round",
            *(sum(depths), depth),
        )
        check_depths(depths, depth)
        if self.on_infeasible == "eq3":
            return draw_independent(depths, depth, rng)
        return draw_disjoint(depths, depth, rng, last if self.prefer_stale else None)


METHOD = Method(server=RandomAllocation, knob="which blocks a client holds has no strength")
