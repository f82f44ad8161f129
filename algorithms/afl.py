"""AFL: minimax weights of the clients, by projected gradient ascent on their losses.

Mohri, Sivek, Suresh, Agnostic Federated Learning, ICML 2019 [mohri2019afl], Algorithm 1 (the lambda step),
with FedAvg's local training.

Differs from the paper: clients train for local epochs, and the result is the last model; `output=mean` gives
the mean of the iterates, as in the paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from algorithms._arrays import Array, like, to_numpy
from algorithms._losses import LossWeighted
from rayfed import Cohort, Knob, Local, Method, ServerState, Update
from rayfed.types import NonNegative, Params

MIXTURE = "mixture"
ITERATE = "iterate"
"""Parameters from which the next round begins, where the state's are the mean of all iterates."""
NUM_ITERATES = "num_iterates"


@dataclass(frozen=True)
class AgnosticServer(LossWeighted):
    """Server with projected gradient ascent on the weights of the clients.

    Unless it is memoryless, it keeps a weight for every client of the experiment, which its state grows with.

    Attributes:
        lr_lambda: Step size of the weights; 0 gives FedAvg.
        memoryless: Start in every round from the clients' shares of the data (the FedGCR authors' baseline)
            instead of from the weights of the round before.
        output: Global model that is scored and saved: the last one, or the mean of the models of all rounds
            so far. Clients receive and train the last one in both cases.
    """

    lr_lambda: NonNegative = 0.1
    weighting: Literal["data_size", "uniform"] = "data_size"
    memoryless: bool = False
    output: Literal["last", "mean"] = "last"

    def round(self, state: ServerState, cohort: Cohort, local: Local) -> ServerState:
        if self.output == "last":
            return super().round(state, cohort, local)
        done = state.memory.get(NUM_ITERATES, 0)
        last = state.memory[ITERATE] if done else state.params
        after = super().round(replace(state, params=last), cohort, local)
        mean = next_mean(state.params, after.params, done)
        return replace(after, params=mean).remember(**{ITERATE: after.params, NUM_ITERATES: done + 1})

    def aggregate(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> ServerState:
        losses = self.losses(cohort, updates)
        before = self._mixture(state, cohort, updates)
        for update, loss in zip(updates, losses, strict=True):
            before[update.client] += self.lr_lambda * loss
        after = dict(zip(before, project_to_simplex(list(before.values())).tolist(), strict=True))
        weights = [after[update.client] for update in updates]
        if sum(weights) <= 0:  # all weight is on clients outside this round
            weights = self.base_weights(updates)
        self.record_weights(cohort, updates, weights)
        return self.average(state, updates, weights).remember(**{MIXTURE: after})

    def _mixture(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> dict[str, float]:
        """Weights of the clients before the step, by id, summing to 1."""
        known: dict[str, Any] = {} if self.memoryless else dict(state.memory.get(MIXTURE, {}))
        if known:
            return known
        ids = [update.client for update in updates] if self.memoryless else cohort.all_ids
        counts = {
            cid: 1.0 if self.weighting == "uniform" else cohort.clients[cid].num_examples for cid in ids
        }
        total = sum(counts.values())
        return {cid: count / total for cid, count in counts.items()}


def next_mean(mean: Params, value: Params, count: int) -> Params:
    """Mean of `count` + 1 values: that of the first `count` is `mean`, and `value` comes in addition."""
    return {name: mean[name] + (new - mean[name]) / (count + 1) for name, new in value.items()}


def project_to_simplex(v: Array) -> Array:
    """Euclidean projection onto the probability simplex: entries >= 0 that sum to 1.

    Duchi et al., Efficient Projections onto the l1-Ball, ICML 2008, Figure 1.

    Raises:
        ValueError: An entry is NaN or infinite, or `v` is empty.
    """
    values = to_numpy(v)
    if not values.size or not np.isfinite(values).all():
        raise ValueError(f"cannot project {values.tolist()} onto the simplex: give finite numbers")
    ordered = np.sort(values)[::-1]
    room = (1 - np.cumsum(ordered)) / np.arange(1, len(ordered) + 1)
    last = np.flatnonzero(ordered + room > 0)[-1]
    return like(np.maximum(values + room[last], 0), v)


METHOD = Method(server=AgnosticServer, knob=Knob("server.lr_lambda", 0.01, 1.0))
