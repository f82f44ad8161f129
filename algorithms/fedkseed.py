"""FedKSeed: clients send seeds and numbers, from which the server repeats their steps in random directions.

Qin et al., Federated Full-Parameter Tuning of Billion-Sized Language Models with Communication Cost under 18
Kilobytes, ICML 2024 [qin2024fedkseed]. There are K seeds. A step draws one, whose direction z is standard
normal, and moves the values w by -lr g z, where g = (L(w + eps z) - L(w - eps z)) / (2 eps) is read from two
losses without any gradient (MeZO's step). The sum of all steps along each of the K directions, weighted by
the clients' weights, is the whole model: clients receive K numbers, and rebuild it from the start values.

The paper is not in our copy: this follows its abstract and a fork of the released code, whose eps is the
default. Clients send steps, -lr g, and not g, so that `train.schedule` works. Where clients hold parts of the
model (`capacity`), K numbers do not suffice, and whole tensors are sent down. `train.optimizer`, momentum and
weight decay have no effect. Seeds are drawn uniformly: FedKSeed-Pro is not built. `channel` and attacks on
values are refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from algorithms._lora import check_own_rule
from rayfed import Broadcast, Client, Cohort, Knob, Local, Method, Server, ServerState, Update
from rayfed.devices import HOST, move, numbers
from rayfed.federation.aggregation import mean_by_name
from rayfed.federation.params import without_statistics
from rayfed.seeds import derive
from rayfed.types import RESIDUAL, Batch, Count, Params, Positive, cut_to_rank

SUMS, POOL, SEED = "sums", "pool", "seed"
"""Names in `shared`: sums of all steps of each seed, number of seeds, and the seed of the experiment."""
SEEDS, STEPS, HELD = "seeds", "steps", "held"
"""Names in `extra`: numbers of the seeds, lengths of the steps, and the names of the tensors that moved."""
START = "start"
"""Name in `ServerState.memory` of the start values."""


def direction(seed: int, number: int, names: Mapping[str, Tensor]) -> Params:
    """The direction of a seed: standard normal numbers that depend on (seed, number, name), on the CPU.

    Args:
        number: Number of the seed of the pool.
        names: Tensors by global name, for their shapes and data types.
    """
    directions: Params = {}
    for name, value in names.items():
        drawn = torch.Generator().manual_seed(derive(seed, "fedkseed", number, name))
        directions[name] = torch.randn(value.shape, generator=drawn).type(value.dtype)
    return directions


def moved_by(start: Params, seed: int, steps: Mapping[int, float], rank: int | None = None) -> Params:
    """Copies of some values after steps along directions.

    Args:
        start: Values by global name.
        steps: Lengths of the steps by number of the seed; they are made in this order.
        rank: Rank of a client's LoRA adapters, beyond which nothing moves; None: that of the tuning.
    """
    now = {name: value.clone() for name, value in start.items()}
    device = next((value.device for value in start.values()), HOST)
    for number, length in steps.items():
        towards = move(cut_to_rank(direction(seed, number, start), rank), device)
        for name, z in towards.items():
            now[name].add_(z, alpha=length)
    return now


@dataclass(frozen=True)
class Replay(Server):
    """Server that repeats the steps of the clients.

    Attributes:
        pool: Number K of seeds.
    """

    pool: Count = 4096

    offers: ClassVar[frozenset[str]] = frozenset({SUMS})
    needs: ClassVar[frozenset[str]] = frozenset({STEPS})

    def __post_init__(self) -> None:
        check_own_rule(self)

    def start(self, params: Params) -> ServerState:
        moving = {n: v for n, v in without_statistics(params).items() if not n.endswith(RESIDUAL)}
        return replace(super().start(params), memory={START: moving, SUMS: torch.zeros(self.pool)})

    def send(self, state: ServerState, cohort: Cohort) -> Mapping[str, Broadcast]:
        shared = {POOL: self.pool, SEED: cohort.seed}
        known = SUMS in state.memory
        shared |= {SUMS: state.memory[SUMS]} if known else {}
        return {
            cid: state.broadcast({} if known else None, blocks=cohort.prefix(cid), **shared)
            for cid in cohort.ids
        }

    def aggregate(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> ServerState:
        return super().aggregate(state.remember(**{SEED: cohort.seed}), cohort, updates)

    def average(self, state: ServerState, updates: Sequence[Update], weights: Sequence[float]) -> ServerState:
        seed, memory = state.memory[SEED], dict(state.memory)
        everything = all(set(update.extra[HELD]) == set(memory[START]) for update in updates)
        if SUMS in memory and everything and all(update.rank is None for update in updates):
            sums = memory[SUMS].clone()
            for update, weight in zip(updates, weights, strict=True):
                sums.index_add_(0, update.extra[SEEDS], update.extra[STEPS] * weight)
            params = {**state.params, **rebuild(memory[START], seed, sums)}
            return replace(state, params=params, memory={**memory, SUMS: sums})
        ends = []
        for update in updates:
            held = cut_to_rank({n: state.params[n] for n in update.extra[HELD]}, update.rank)
            for number, length in zip(*(update.extra[key].tolist() for key in (SEEDS, STEPS)), strict=True):
                held = moved_by(held, seed, {number: length}, update.rank)
            ends.append(replace(update, params=held))
        memory.pop(SUMS, None)
        return replace(state, params={**state.params, **mean_by_name(ends, weights)}, memory=memory)


def rebuild(start: Params, seed: int, sums: Tensor) -> Params:
    """The values after all steps, from the start values and the sums of the steps by seed, shape (K,)."""
    steps = enumerate(sums.tolist())
    return moved_by(start, seed, {number: length for number, length in steps if length})


@dataclass(frozen=True)
class ZerothOrder(Local):
    """Local training by differences of losses along random directions.

    Attributes:
        eps: Length of the steps along a direction at whose ends the loss is read.
    """

    eps: Positive = 5e-4

    offers: ClassVar[frozenset[str]] = frozenset({STEPS})
    needs: ClassVar[frozenset[str]] = frozenset({SUMS})
    trained_in_extra: ClassVar[bool] = True

    @property
    def averages_rows(self) -> bool:
        return False

    @torch.no_grad()
    def train(self, client: Client, sent: Broadcast) -> Update:
        seed, live = sent.shared[SEED], client.trainable()
        if SUMS in sent.shared:
            start = cut_to_rank({n: p.detach().clone() for n, p in live.items()}, client.rank)
            client.load(cut_to_rank(rebuild(start, seed, sent.shared[SUMS]), client.rank))
        client.model.eval()  # a difference of losses says nothing if both have their own dropout
        seeds, steps = [], []
        for batch in client.batches():
            number = int(torch.randint(sent.shared[POOL], (), generator=client.rng))
            length = self.move(client, sent, batch, direction(seed, number, live))
            seeds.append(number)
            steps.append(length)
        extra = {SEEDS: torch.tensor(seeds, dtype=torch.int64), STEPS: torch.tensor(steps), HELD: [*live]}
        return client.update(params={}, extra=extra)

    def move(self, client: Client, sent: Broadcast, batch: Batch, z: Params) -> float:
        """One step along a direction; returns its length, -lr g."""
        live = client.trainable()
        z = move(cut_to_rank(z, client.rank), client.device)
        now = {name: parameter.detach().clone() for name, parameter in live.items()}
        losses = []
        for sign in (1, -1):
            client.load({name: now[name] + sign * self.eps * z[name] for name in live})
            losses.append(self.loss(client, sent, batch))
        plus, minus = numbers(losses)
        length = -client.config.lr * (plus - minus) / (2 * self.eps)
        client.load({name: now[name] + length * z[name] for name in live})
        return length


METHOD = Method(server=Replay, local=ZerothOrder, knob=Knob("local.eps", 0.0001, 0.01))
