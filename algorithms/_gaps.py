"""Generalization gaps: loss of the mean model at a client minus the loss of the client's own model."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rayfed import Cohort, Local, Server, ServerState, Update
from rayfed.errors import NobodyAnsweredError
from rayfed.federation.client_tasks import evaluate, fit
from rayfed.federation.cohort import TRAINING, Ledger
from rayfed.federation.executor import ClientTask

log = logging.getLogger(__name__)

WEIGHTS = "weights"
Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class GapServer(Server):
    """Server that remembers the weights of clients; subclasses change them according to the gaps.

    The weights are those of all clients, also of clients that never take part, so the state grows with them.

    Attributes:
        weighting: Weights in the first round: the same for all clients, or by number of training examples.
        gap_split: Split on which losses are computed, in evaluation mode.
    """

    weighting: Literal["data_size", "uniform"] = "uniform"
    gap_split: Literal["val", "train"] = "val"

    def round(self, state: ServerState, cohort: Cohort, local: Local) -> ServerState:
        state = local.exchange(state, cohort)
        updates = cohort.run(self.training_task(local), self.send(state, cohort), tag=TRAINING)
        return self.aggregate(state, cohort, updates, local)

    def training_task(self, local: Local) -> ClientTask:
        return partial(fit, local=local, end=self.gap_split)

    def aggregate(
        self, state: ServerState, cohort: Cohort, updates: Sequence[Update], local: Local | None = None
    ) -> ServerState:
        """Combine the updates; see `Server.aggregate`.

        Args:
            state: State before the round.
            cohort: Clients of the round.
            updates: Answers of the training exchange.
            local: Client half, whose `prepare` is called before the mean model is scored, as it is before the
                client's own model is; None: inputs are used as they are.
        """
        raise NotImplementedError

    def weights(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> Vector:
        """Weights of the clients of these updates, scaled to sum 1."""
        raw = np.array([self._all(state, cohort)[u.client] for u in updates])
        total = raw.sum()
        return raw / total if total > 0 else np.full(len(raw), 1 / len(raw))

    def store(
        self, state: ServerState, cohort: Cohort, updates: Sequence[Update], weights: Vector
    ) -> ServerState:
        """Remember the new weights of these clients.

        They are scaled so that these clients keep their former share of the total over all clients.
        """
        before = self._all(state, cohort)
        share = sum(before[u.client] for u in updates)
        changed = {u.client: float(w) * share for u, w in zip(updates, weights, strict=True)}
        return state.remember(**{WEIGHTS: {**before, **changed}})

    def _all(self, state: ServerState, cohort: Cohort) -> dict[str, float]:
        """Weights of all clients of the experiment, by id, summing to 1."""
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
        self,
        state: ServerState,
        cohort: Cohort,
        updates: Sequence[Update],
        local: Local | None,
        tag: str,
        counted: bool = True,
    ) -> Vector:
        """Loss of the mean model minus the loss of a client's own model, one per update; NaN where unknown.

        Args:
            state: State whose `params` are the mean model.
            cohort: Clients of the round.
            updates: Answers of the training exchange, with the loss of each client's own model.
            local: Client half, as of `aggregate`.
            tag: Name of the exchange.
            counted: Whether this broadcast counts as traffic. It does not where the same model begins the
                next round, because its broadcast is counted there.
        """
        target = cohort if counted else replace(cohort, ledger=Ledger())
        sent = {u.client: state.broadcast(blocks=cohort.prefix(u.client)) for u in updates}
        answers: Sequence[Update] = ()
        with suppress(NobodyAnsweredError):  # the trained updates are still averaged
            answers = target.run(partial(evaluate, split=self.gap_split, local=local), sent, tag=tag)
        metrics = {answer.client: answer.metrics for answer in answers}
        gaps = [_loss(metrics.get(u.client, {}), "loss") - _loss(u.metrics, "end/loss") for u in updates]
        return np.array(gaps)


def _loss(metrics: Any, name: str) -> float:
    return float(metrics.get(name, np.nan))


def all_known(gaps: Vector, who: Sequence[str] = ()) -> bool:
    """Whether every gap is finite; logs a warning if not.

    Args:
        gaps: One per client.
        who: Ids of the clients, for the warning.
    """
    unknown = np.flatnonzero(~np.isfinite(gaps))
    if unknown.size:
        names = ", ".join(who[i] for i in unknown[:3]) if who else f"client {int(unknown[0])}"
        log.warning(
            "the generalization gap of %s is not a number (no validation images: set data.val, a loss "
            "that is not finite, or no answer); the weights stay as they are",
            names,
        )
    return not unknown.size


def clip_to_simplex(weights: Vector, fallback: Vector) -> Vector:
    """Weights clipped to [0, 1] and scaled to sum 1; `fallback` where all clipped weights are 0."""
    inside = np.clip(weights, 0, 1)
    total = inside.sum()
    return inside / total if total > 0 else fallback


def outside(weights: Vector) -> float:
    """Number of weights outside [0, 1], which `clip_to_simplex` changes."""
    return float(((weights < 0) | (weights > 1)).sum())


def variance(gaps: Vector) -> float:
    """Sum over all ordered pairs of clients of the squared difference of their gaps; FFT-GP, Eq. 6."""
    return float(((gaps[:, None] - gaps[None]) ** 2).sum())
