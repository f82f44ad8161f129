"""Generalization gaps: how much worse the mean model does at a client than the client's own."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rayfed.errors import NobodyAnsweredError
from rayfed.federation.cohort import Cohort, Ledger
from rayfed.federation.executor import Task
from rayfed.federation.local import Local
from rayfed.federation.server import Server
from rayfed.federation.visit import evaluate, fit
from rayfed.types import ServerState, Update

log = logging.getLogger(__name__)

WEIGHTS = "weights"
Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class GapServer(Server):
    """A weighted mean whose weights are state: `adapt` changes them by what the gaps say.

    Attributes:
        weighting: Weights at the start.
        gap_split: Split on which models are compared, in evaluation mode.
    """

    weighting: Literal["data_size", "uniform"] = "uniform"
    gap_split: Literal["val", "train"] = "val"

    def visit(self, local: Local) -> Task:
        return partial(fit, local=local, end=self.gap_split)

    def weights(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> Vector:
        """Weights of these clients, summing to 1."""
        mine = np.array([self._all(state, cohort)[u.client] for u in updates])
        total = mine.sum()
        return mine / total if total > 0 else np.full(len(mine), 1 / len(mine))

    def store(
        self, state: ServerState, cohort: Cohort, updates: Sequence[Update], weights: Vector
    ) -> ServerState:
        """Remember the weights of these clients; together they keep the share they had of everybody's."""
        everyone = self._all(state, cohort)
        share = sum(everyone[u.client] for u in updates)
        mine = {u.client: float(w) * share for u, w in zip(updates, weights, strict=True)}
        return state.remember(**{WEIGHTS: {**everyone, **mine}})

    def _all(self, state: ServerState, cohort: Cohort) -> dict[str, float]:
        known: dict[str, float] | None = state.memory.get(WEIGHTS)
        if known is not None:
            return dict(known)
        sizes = {
            cid: 1.0 if self.weighting == "uniform" else float(cohort.clients[cid].num_examples)
            for cid in cohort.all_ids
        }
        total = sum(sizes.values())
        return {cid: size / total for cid, size in sizes.items()}

    def gaps(
        self, state: ServerState, cohort: Cohort, updates: Sequence[Update], counted: bool, tag: str
    ) -> Vector:
        """Loss of `state.params` minus the loss of a client's own model, by update; NaN where unknown.

        Args:
            state: Holds the mean model that is looked at.
            cohort: Reaches the clients.
            updates: Their answers, with the loss of their own models.
            counted: Whether this broadcast counts as traffic; that of a model which is the start of the next
                round is counted there.
            tag: Name of the exchange.
        """
        looking = cohort if counted else replace(cohort, ledger=Ledger())
        sent = {u.client: state.broadcast(blocks=cohort.prefix(u.client)) for u in updates}
        answers: Sequence[Update] = ()
        with suppress(NobodyAnsweredError):  # what was trained is worth keeping
            answers = looking.run(partial(evaluate, split=self.gap_split), sent, tag=tag)
        metrics = {answer.client: answer.metrics for answer in answers}
        found = [_loss(metrics.get(u.client, {}), "loss") - _loss(u.metrics, "end/loss") for u in updates]
        return np.array(found)


def _loss(metrics: Any, name: str) -> float:
    return float(metrics.get(name, np.nan))


def all_known(gaps: Vector, who: Sequence[str] = ()) -> bool:
    """Whether every gap is a number; warns where not."""
    odd = np.flatnonzero(~np.isfinite(gaps))
    if odd.size:
        names = ", ".join(who[i] for i in odd[:3]) if who else f"client {int(odd[0])}"
        log.warning(
            "the generalization gap of %s is not a number (no validation images: set data.val, a loss "
            "that is not finite, or no answer); the weights stay as they are",
            names,
        )
    return not odd.size


def clipped(weights: Vector, fallback: Vector) -> Vector:
    """Weights clipped to [0, 1] and scaled to sum 1; the fallback where nothing is left."""
    inside = np.clip(weights, 0, 1)
    total = inside.sum()
    return inside / total if total > 0 else fallback


def outside(weights: Vector) -> float:
    """How many weights `clipped` would change before it scales them."""
    return float(((weights < 0) | (weights > 1)).sum())


def variance(gaps: Vector) -> float:
    """Sum over all pairs of clients of the squared difference; FFT-GP, Eq. 6."""
    return float(((gaps[:, None] - gaps[None]) ** 2).sum())
