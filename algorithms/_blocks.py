"""Base class of servers that decide which blocks each client holds in a round.

The allocation of a round is made before anything is sent, and kept in `ServerState.memory`. The traffic
counts the frozen weights that a real client would have to download for its blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from annotated_types import Ge

from rayfed import Broadcast, Client, Cohort, Local, Server, ServerState, Update
from rayfed.errors import ConfigError
from rayfed.federation.aggregation import mean_by_name
from rayfed.federation.client_tasks import fit
from rayfed.federation.executor import ClientTask
from rayfed.federation.params import subtract, without_statistics
from rayfed.types import NonNegative, Params

Blocks: TypeAlias = dict[str, tuple[int, ...]]
"""Blocks by client: ascending global indices."""

FEDDYN_ALPHA = "feddyn_alpha"
"""Name under which the server shares FedDyn's alpha."""

FEDDYN_MEAN = "feddyn_mean_examples"
"""Name under which the server shares the mean number of training examples of all clients."""

SAMPLES_SEEN = "samples_seen"
"""Metric: number of examples, with repetition, in the batches of a client's training."""

FEDDYN_UPDATE = "feddyn_update"
"""Offered by local halves that keep FedDyn's gradient term."""


@dataclass(frozen=True)
class BlockServer(Server):
    """Each client holds the first blocks, as many as its capacity; override `allocate` for another rule.

    Attributes:
        weighting: Weight of a client in the mean: its number of training examples, the same for all, or the
            number of examples, with repetition, in the batches of this round's training.
        frozen_cache: Which frozen blocks a client keeps between rounds; decides how many bytes it downloads.
            `none`: it downloads its blocks in every round; `all`: each block once; `lru`: it keeps the
            `cache_blocks` most recently used blocks; `preinstalled`: it has all blocks from the beginning.
        cache_blocks: Number of blocks in the `lru` cache.
        frozen_bytes_per_number: Bytes per frozen weight: 4 for float32, 2 for half precision.
        feddyn_alpha: Strength of FedDyn's server correction, with uniform weights over the holders of a
            block; 0: no correction. Needs `local.name=feddyn`.
        feddyn_alpha_by: Alpha of a client's loss: the same for all clients, or (data) `feddyn_alpha` times
            the mean number of training examples of all clients over its own, as in FedDyn's released code.
    """

    weighting: Literal["data_size", "uniform", "samples_seen"] = "data_size"  # type: ignore[assignment]
    frozen_cache: Literal["none", "lru", "all", "preinstalled"] = "all"
    cache_blocks: Annotated[int, Ge(1)] = 12
    frozen_bytes_per_number: Literal[2, 4] = 4
    feddyn_alpha: NonNegative = 0.0
    feddyn_alpha_by: Literal["same", "data"] = "same"

    by_block: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.feddyn_alpha and self.lora_agg != "factor_mean":
            raise ConfigError(
                f"server.lora_agg: {self.lora_agg!r} changes values that FedDyn remembers; use factor_mean"
            )

    @property
    def offers(self) -> frozenset[str]:  # type: ignore[override]  # depends on a value
        return frozenset({FEDDYN_ALPHA} if self.feddyn_alpha else ())

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({FEDDYN_UPDATE} if self.feddyn_alpha else ())

    def allocate(self, state: ServerState, cohort: Cohort) -> Blocks:
        """Blocks of each client of the cohort in this round."""
        return {cid: tuple(range(cohort.capacity[cid])) for cid in cohort.ids}

    def round(self, state: ServerState, cohort: Cohort, local: Local) -> ServerState:
        state = self.plan(state, cohort)
        if self.feddyn_alpha:
            state = state.share(**self.feddyn_terms(cohort))
        return self.record_visits(super().round(state, cohort, local), cohort)

    def feddyn_terms(self, cohort: Cohort) -> dict[str, float]:
        """Settings of FedDyn that the clients' losses need."""
        if self.feddyn_alpha_by == "same":
            return {FEDDYN_ALPHA: self.feddyn_alpha}
        sizes = [info.num_examples for info in cohort.clients.values()]
        return {FEDDYN_ALPHA: self.feddyn_alpha, FEDDYN_MEAN: sum(sizes) / len(sizes)}

    def training_task(self, local: Local) -> ClientTask:
        return (
            partial(fit_counted, local=local)
            if self.weighting == SAMPLES_SEEN
            else super().training_task(local)
        )

    def plan(self, state: ServerState, cohort: Cohort) -> ServerState:
        """Allocate blocks, count the frozen bytes to download, and record both in the table `allocations`."""
        blocks = self.allocate(state, cohort)
        sizes = [size * self.frozen_bytes_per_number // 4 for size in cohort.block_bytes]
        caches = dict(state.memory.get("cache", {}))
        frozen: dict[str, int] = {}
        for cid in cohort.ids:
            kept = caches.get(cid, [])
            frozen[cid] = sum(sizes[j] for j in blocks[cid] if j not in kept)
            caches[cid] = self._cache_after(kept, blocks[cid])
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

    def record_visits(self, state: ServerState, cohort: Cohort) -> ServerState:
        """Record in the table `block_visits` how many clients that answered trained each block."""
        missing = set(cohort.ledger.missing)
        plan = state.memory["plan"]
        trained = [plan[cid]["blocks"] for cid in cohort.ids if cid not in missing]
        holders = [sum(j in held for held in trained) for j in range(cohort.depth)]
        before = state.memory.get("visits", [0] * cohort.depth)
        visits = [a + b for a, b in zip(before, holders, strict=True)]
        for j, number in enumerate(holders):
            cohort.record("block_visits", block=j, holders=number, visits=visits[j])
        cohort.measure(blocks_unselected=float(sum(number == 0 for number in holders)))
        last = state.memory.get("last_round", [-1] * cohort.depth)
        last = [cohort.round if n else r for n, r in zip(holders, last, strict=True)]
        return state.remember(visits=visits, last_round=last)

    def _cache_after(self, kept: list[int], used: Sequence[int]) -> list[int]:
        """Content of a client's cache after it used these blocks, least recently used first."""
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
        if self.weighting == SAMPLES_SEEN:
            seen = [u.metrics[SAMPLES_SEEN] for u in updates]
            return [number / sum(seen) for number in seen]
        return super().base_weights(updates)

    def aggregate(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> ServerState:
        after = super().aggregate(state, cohort, updates)
        return self.feddyn_correct(state, after, updates, len(cohort.clients)) if self.feddyn_alpha else after

    def feddyn_correct(
        self, before: ServerState, after: ServerState, updates: Sequence[Update], num_clients: int
    ) -> ServerState:
        """FedDyn's server step for each name: h -= alpha / N * sum of changes; the mean minus h / alpha."""
        params, h = dynamic_step(
            before.params, after.params, updates, before.memory.get("h", {}), self.feddyn_alpha, num_clients
        )
        return replace(after, params=params).remember(h=h)


def fit_counted(client: Client, sent: Broadcast, local: Local) -> Update:
    """As `fit`, and also returns the number of examples in the batches of the training, as SAMPLES_SEEN.

    Args:
        client: The client; its model holds `sent.params`.
        sent: Message from the server.
        local: Client half of the method.
    """
    update = fit(client, sent, local)
    client.measure(**{SAMPLES_SEEN: client.config.examples(client.data.size("train"))})
    return update


def dynamic_step(
    start: Params,
    mean: Params,
    updates: Sequence[Update],
    h: Mapping[str, Any],
    alpha: float,
    num_clients: int,
) -> tuple[Params, Params]:
    """FedDyn's server step for each name.

    Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, Algorithm 1.

    Args:
        start: Global values at the beginning of the round.
        mean: Values after averaging, uniform over holders.
        updates: Answers of clients; a name that no client sent keeps its value and its h.
        h: Server state h by name; absent names are 0.
        alpha: Strength of the correction.
        num_clients: Number of clients of the experiment, not only of this round.

    Returns:
        The corrected values and the new h. BatchNorm statistics are not corrected.
    """
    changes = [replace(u, params=subtract(u.params, start)) for u in updates]
    moves = mean_by_name(changes, [1.0] * len(changes))
    params = dict(mean)
    new_h = dict(h)
    for name, move in without_statistics(moves).items():
        holders = sum(name in u.params for u in updates)
        step = move * (holders * alpha / num_clients)
        new_h[name] = h[name] - step if name in h else -step
        params[name] = mean[name] - new_h[name] / alpha
    return params, new_h
