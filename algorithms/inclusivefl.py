"""InclusiveFL: clients train the first blocks, with momentum distillation from larger to smaller models.

Liu et al., No One Left Behind: Inclusive Federated Learning over Heterogeneous Devices, KDD 2022
[liu2022inclusivefl], section 3.3, as the baseline of FedRA [su2024fedra], section 4.1.

Differs from the released codes, in which the momentum is computed but never added (KDD) or never computed
(FedRA): here it is added. `md=false` gives the behaviour of the released codes, averaging without momentum.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch

from algorithms._blocks import BlockServer
from rayfed import Broadcast, Cohort, Knob, Method, ServerState, Update, is_statistic
from rayfed.errors import ConfigError
from rayfed.federation.aggregation import mean_by_name
from rayfed.federation.params import subtract
from rayfed.types import Fraction, Params, block_of

Moves = dict[int, Params]
"""Mean change of every tensor in a round, by size (number of blocks) of the client models."""


@dataclass(frozen=True)
class InclusiveServer(BlockServer):
    """Mean of each block over its holders, with momentum distillation.

    Attributes:
        md: Momentum distillation: the change of the last block of a smaller model includes a share of the
            last round's change of deeper blocks of the next larger model.
        beta: That share.
        range: Blocks of the larger model whose changes are averaged: those after the smaller model's last
            block (exclusive), or from that block on (inclusive).
        memory: Changes remembered for the next round: those with distillation (injected) or without (raw).
        private_top: Each size of client models has its own last block and head, as in the KDD paper. They are
            sent to clients of that size only, and are not averaged into larger models. Those of the largest
            clients are the ones of the global model, also where no client holds all blocks.
    """

    md: bool = True
    beta: Fraction = 0.2
    range: Literal["exclusive", "inclusive"] = "exclusive"
    memory: Literal["injected", "raw"] = "injected"
    private_top: bool = False

    sent_tensors_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.md or self.private_top) and self.lora_agg != "factor_mean":
            raise ConfigError(
                f"server.lora_agg: {self.lora_agg!r} changes the factors whose changes are remembered; use "
                f"factor_mean, or server.md=false server.private_top=false"
            )

    def send(self, state: ServerState, cohort: Cohort) -> Mapping[str, Broadcast]:
        messages = super().send(state, cohort)
        begin = self._begin(state, {len(m.blocks or ()) for m in messages.values()}, cohort)
        return {cid: replace(m, params=begin[len(m.blocks or ())]) for cid, m in messages.items()}

    def _begin(self, state: ServerState, sizes: Iterable[int], cohort: Cohort) -> dict[int, Params]:
        """Values that clients of each size receive; one dict per size, so that it is transferred once."""
        tops = state.memory.get("tops", {})
        largest = max(cohort.capacity.values())
        own = {s for s in sizes if s < largest and str(s) in tops}
        return {s: {**state.params, **tops[str(s)]} if s in own else state.params for s in sizes}

    def aggregate(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> ServerState:
        if not (self.md or self.private_top):
            return super().aggregate(state, cohort, updates)
        plan: Mapping[str, Any] = state.memory["plan"]
        sizes = [len(plan[u.client]["blocks"]) for u in updates]
        weights = self.base_weights(updates)
        self.record_weights(cohort, updates, weights)
        begin = self._begin(state, sizes, cohort)
        raw: Moves = {}
        for size in sorted(begin):
            of_size = [(u, w) for u, w, s in zip(updates, weights, sizes, strict=True) if s == size]
            group, share = zip(*of_size, strict=True)
            raw |= size_moves(begin[size], group, share, [size] * len(group))
        memory = state.memory.get("moves", {}) if self.md else {}
        moves = inject(raw, memory, self.beta, self.range == "inclusive")
        mass = {s: sum(w for w, size in zip(weights, sizes, strict=True) if size == s) for s in moves}
        kept = moves if self.memory == "injected" else raw
        # A checkpoint keeps names as strings.
        state = state.remember(moves={str(s): move for s, move in kept.items()})
        if self.private_top:
            moves, tops = split_tops(moves, begin, max(cohort.capacity.values()))
            state = state.remember(tops={**state.memory.get("tops", {}), **tops})
        after = replace(state, params=apply_moves(state.params, moves, mass))
        return self.feddyn_correct(state, after, updates, len(cohort.clients)) if self.feddyn_alpha else after


def size_moves(
    start: Params, updates: Sequence[Update], weights: Sequence[float], sizes: Sequence[int]
) -> Moves:
    """Weighted mean change of the clients of each size, sizes ascending.

    Args:
        start: Values before training.
        updates: Answers of clients.
        weights: One per update.
        sizes: Number of blocks of each client's model.
    """
    moves: Moves = {}
    for size in sorted(set(sizes)):
        of_size = [(u, w) for u, w, s in zip(updates, weights, sizes, strict=True) if s == size]
        changes = [replace(u, params=subtract(u.params, start)) for u, _ in of_size]
        moves[size] = mean_by_name(changes, [w for _, w in of_size])
    return moves


def split_tops(moves: Moves, begin: Mapping[int, Params], largest: int) -> tuple[Moves, dict[str, Params]]:
    """Separate the changes of the private last block and head of each size below the largest from the others.

    Args:
        moves: Changes by size.
        begin: Values before training, by size.
        largest: Size of the largest client models of the experiment, whose head is that of the global model.

    Returns:
        The changes of all other tensors, by size, and the new private values, by size as text.
    """
    shared = dict(moves)
    tops = {}
    for size in [s for s in moves if s < largest]:
        own = [n for n in moves[size] if block_of(n) == size - 1 or n.startswith("head.")]
        tops[str(size)] = {n: begin[size][n] + moves[size][n] for n in own}
        shared[size] = {n: move for n, move in moves[size].items() if n not in own}
    return shared, tops


def inject(moves: Moves, memory: Mapping[str, Params], beta: float, inclusive: bool) -> Moves:
    """Add momentum distillation to the change of each smaller size's last block (section 3.3).

    Args:
        moves: Changes of this round, by size, ascending.
        memory: Changes remembered from the round before, by size as text; missing sizes are skipped.
        beta: Share of the momentum.
        inclusive: Whether the mean over deeper blocks begins at the smaller model's last block.
    """
    result = {size: dict(move) for size, move in moves.items()}
    for small, large in pairwise(sorted(moves)):
        past = memory.get(str(large))
        last = small - 1
        if past is None:
            continue
        for name in [n for n in result[small] if block_of(n) == last and not is_statistic(n)]:
            leaf = name.removeprefix(f"blocks.{last}.")
            deeper = [past[f"blocks.{j}.{leaf}"] for j in range(last if inclusive else small, large)]
            momentum = torch.stack(deeper).mean(0)
            result[small][name] = (1 - beta) * result[small][name] + beta * momentum
    return result


def apply_moves(start: Params, moves: Moves, mass: Mapping[int, float]) -> Params:
    """Add to each tensor the mean change over the sizes that have it.

    Args:
        start: Values before the round.
        moves: Changes by size.
        mass: Weight of each size: the sum of the weights of its clients.
    """
    each = [Update(client=str(size), params=move) for size, move in moves.items()]
    mean = mean_by_name(each, [mass[size] for size in moves])
    return {**start, **{name: start[name] + move for name, move in mean.items()}}


METHOD = Method(server=InclusiveServer, knob=Knob("server.beta", 0.05, 0.8))
