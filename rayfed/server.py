"""The server half of a method. Overriding nothing gives FedAvg's weighted mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

from rayfed.cohort import Cohort, Task
from rayfed.local import Local
from rayfed.params import mean_by_name
from rayfed.tasks import fit
from rayfed.types import Broadcast, Params, ServerState, Update


@dataclass(frozen=True)
class Server:
    """Server rule. Holds hyperparameters only; what it must remember goes through ServerState.

    McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
    Algorithm 1.

    Attributes:
        weighting: Weight of a client in the mean: its number of training examples, or the same for all.
    """

    weighting: Literal["data_size", "uniform"] = "data_size"

    offers: ClassVar[frozenset[str]] = frozenset()
    needs: ClassVar[frozenset[str]] = frozenset()

    def start(self, params: Params) -> ServerState:
        return ServerState(round=0, params=params)

    def round(self, state: ServerState, cohort: Cohort, local: Local) -> ServerState:
        """One communication round: any number of exchanges, then the next state."""
        state = local.exchange(state, cohort)
        updates = cohort.run(self.visit(local), self.send(state, cohort))
        return self.aggregate(state, cohort, updates)

    def visit(self, local: Local) -> Task:
        """What a client does in the training exchange; ask here for scores before or after training."""
        return partial(fit, local=local)

    def send(self, state: ServerState, cohort: Cohort) -> Mapping[str, Broadcast]:
        """What each client receives for training."""
        return dict.fromkeys(cohort.ids, state.broadcast())

    def aggregate(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> ServerState:
        """From trained updates, in the order of the cohort, to the next state. May run more exchanges."""
        return self.average(state, updates, self.base_weights(updates))

    def base_weights(self, updates: Sequence[Update]) -> list[float]:
        """One weight per update, as `weighting` says, summing to 1."""
        raw = [1.0 if self.weighting == "uniform" else float(u.num_examples) for u in updates]
        total = sum(raw)
        return [w / total for w in raw]

    def average(self, state: ServerState, updates: Sequence[Update], weights: Sequence[float]) -> ServerState:
        """Weighted mean per name over holders; a name nobody sent keeps its value."""
        return replace(state, params={**state.params, **mean_by_name(updates, weights)})
