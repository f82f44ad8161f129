"""Servers that decide which blocks each client holds: plan, send, account for frozen bytes, average.

The plan of a round is made before anything is sent, so that it can be recorded and remembered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from annotated_types import Ge

from rayfed.errors import ConfigError
from rayfed.federation.cohort import Cohort
from rayfed.federation.local import Local
from rayfed.federation.params import mean_by_name, subtract
from rayfed.federation.server import Server
from rayfed.types import Broadcast, NonNegative, Params, ServerState, Update, is_statistic

Blocks: TypeAlias = dict[str, tuple[int, ...]]
"""Blocks by client: ascending global indices."""

SHARE, PERSIST = "feddyn_alpha", "feddyn_update"


@dataclass(frozen=True)
class BlockServer(Server):
    """Everybody holds the first blocks, as many as `capacity` says; override `allocate` for another rule.

    Attributes:
        frozen_cache: Which frozen blocks a client keeps, for the bytes it downloads: `none` receives the
            weights of its blocks anew every round, `all` receives a block once, `lru` keeps the
            `cache_blocks` blocks used last, `preinstalled` has them from the beginning.
        cache_blocks: Size of the `lru` cache.
        frozen_bytes_per_number: 4: frozen weights travel in float32; 2: in half precision.
        feddyn_alpha: FedDyn's server correction of this strength, uniform over holders; 0: none. Goes with
            `local.name=feddyn`.
    """

    frozen_cache: Literal["none", "lru", "all", "preinstalled"] = "all"
    cache_blocks: Annotated[int, Ge(1)] = 12
    frozen_bytes_per_number: Literal[2, 4] = 4
    feddyn_alpha: NonNegative = 0.0

    by_block: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.feddyn_alpha and self.lora_agg != "factor_mean":
            raise ConfigError(
                f"server.lora_agg: {self.lora_agg!r} changes what FedDyn remembers; use factor_mean"
            )

    @property
    def offers(self) -> frozenset[str]:  # type: ignore[override]  # depends on a value
        return frozenset({SHARE} if self.feddyn_alpha else ())

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({PERSIST} if self.feddyn_alpha else ())

    def allocate(self, state: ServerState, cohort: Cohort) -> Blocks:
        """Which blocks each client of the cohort holds in this round."""
        return {cid: tuple(range(cohort.capacity[cid])) for cid in cohort.ids}

    def round(self, state: ServerState, cohort: Cohort, local: Local) -> ServerState:
        state = self.plan(state, cohort)
        if self.feddyn_alpha:
            state = state.share(**{SHARE: self.feddyn_alpha})
        return self.count(super().round(state, cohort, local), cohort)

    def plan(self, state: ServerState, cohort: Cohort) -> ServerState:
        """Allocate, account for frozen weights, and record who holds what."""
        blocks = self.allocate(state, cohort)
        sizes = [size * self.frozen_bytes_per_number // 4 for size in cohort.block_bytes]
        caches = dict(state.memory.get("cache", {}))
        frozen: dict[str, int] = {}
        for cid in cohort.ids:
            kept = caches.get(cid, [])
            frozen[cid] = sum(sizes[j] for j in blocks[cid] if j not in kept)
            caches[cid] = self._cached(kept, blocks[cid])
        if self.frozen_cache == "preinstalled":
            frozen = dict.fromkeys(cohort.ids, 0)
        for cid in cohort.ids:
            cohort.record(
                "allocations",
                client=cid,
                capacity=cohort.capacity[cid],
                blocks=list(blocks[cid]),
                frozen_bytes=frozen[cid],
            )
        plan = {cid: {"blocks": list(blocks[cid]), "frozen": frozen[cid]} for cid in cohort.ids}
        keep = {"cache": caches} if self.frozen_cache in ("lru", "all") else {}
        return state.remember(plan=plan, **keep)

    def count(self, state: ServerState, cohort: Cohort) -> ServerState:
        """Remember and record which blocks were trained, by clients whose answers arrived."""
        gone, plan = set(cohort.ledger.missing), state.memory["plan"]
        trained = [plan[cid]["blocks"] for cid in cohort.ids if cid not in gone]
        holders = [sum(j in held for held in trained) for j in range(cohort.depth)]
        before = state.memory.get("visits", [0] * cohort.depth)
        visits = [a + b for a, b in zip(before, holders, strict=True)]
        for j, number in enumerate(holders):
            cohort.record("block_visits", block=j, holders=number, visits=visits[j])
        cohort.measure(blocks_unselected=float(sum(number == 0 for number in holders)))
        last = state.memory.get("last_round", [-1] * cohort.depth)
        last = [cohort.round if n else r for n, r in zip(holders, last, strict=True)]
        return state.remember(visits=visits, last_round=last)

    def _cached(self, kept: list[int], used: Sequence[int]) -> list[int]:
        """The cache after these blocks were used, least recently used first."""
        if self.frozen_cache == "all":
            return sorted({*kept, *used})
        if self.frozen_cache != "lru":
            return []
        order = [j for j in kept if j not in used] + list(used)
        return order[-self.cache_blocks :]

    def send(self, state: ServerState, cohort: Cohort) -> Mapping[str, Broadcast]:
        plan: Mapping[str, Any] = state.memory["plan"]
        return {
            cid: replace(state.broadcast(blocks=tuple(plan[cid]["blocks"])), frozen_bytes=plan[cid]["frozen"])
            for cid in cohort.ids
        }

    def base_weights(self, updates: Sequence[Update]) -> list[float]:
        if self.feddyn_alpha:
            return [1 / len(updates)] * len(updates)
        return super().base_weights(updates)

    def aggregate(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> ServerState:
        after = super().aggregate(state, cohort, updates)
        return self.correct(state, after, updates, len(cohort.clients)) if self.feddyn_alpha else after

    def correct(
        self, before: ServerState, after: ServerState, updates: Sequence[Update], num_clients: int
    ) -> ServerState:
        """FedDyn's server step per name: h -= alpha / N sum of moves, then the mean minus h / alpha."""
        params, h = dynamic_step(
            before.params, after.params, updates, before.memory.get("h", {}), self.feddyn_alpha, num_clients
        )
        return replace(after, params=params).remember(h=h)


def dynamic_step(
    start: Params,
    mean: Params,
    updates: Sequence[Update],
    h: Mapping[str, Any],
    alpha: float,
    num_clients: int,
) -> tuple[Params, Params]:
    """Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, Algorithm 1, per name.

    Args:
        start: Global values at the beginning of the round.
        mean: Values after averaging, uniform over holders.
        updates: What clients sent; a name that nobody sent keeps its value and its h.
        h: Server state by name; absent names are 0.
        alpha: Strength.
        num_clients: All clients of the experiment, not only those of this round.

    Returns:
        The corrected values and the new h. BatchNorm statistics are not corrected.
    """
    changes = [replace(u, params=subtract(u.params, start)) for u in updates]
    moves = mean_by_name(changes, [1.0] * len(changes))
    params, new_h = dict(mean), dict(h)
    for name, move in moves.items():
        if is_statistic(name):
            continue
        holders = sum(name in u.params for u in updates)
        step = move * (holders * alpha / num_clients)
        new_h[name] = h[name] - step if name in h else -step
        params[name] = mean[name] - new_h[name] / alpha
    return params, new_h
