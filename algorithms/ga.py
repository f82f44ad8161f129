"""GA: aggregation weights that grow with the generalization gap of the round before.

Zhang et al., Federated Domain Generalization with Generalization Adjustment, CVPR 2023 [zhang2023ga], section
3, by its released code.

Differs from the code: gaps are of losses instead of accuracies; the step is d / M instead
of d / 3, with M clients; it decreases over T rounds instead of T + 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from algorithms._arrays import Array, like, to_numpy
from algorithms._gaps import GapServer, Vector, all_known, clip_to_simplex, outside, variance
from rayfed import Cohort, Knob, Local, Method, ServerState, Update
from rayfed.types import Positive

SMALLEST = 1e-12
"""Gaps below this are treated as zero."""


@dataclass(frozen=True)
class GeneralizationAdjustment(GapServer):
    """Server whose weights in a round depend on the gaps of the round before.

    Attributes:
        step: Step size d in the first round; it decreases linearly to d / rounds in the last one.
        center: Subtract the mean gap, as in the paper; the released code does not.
    """

    step: Positive = 0.2
    center: bool = False

    def aggregate(
        self, state: ServerState, cohort: Cohort, updates: Sequence[Update], local: Local | None = None
    ) -> ServerState:
        weights = self.weights(state, cohort, updates)
        self.record_weights(cohort, updates, weights.tolist())
        state = self.average(state, updates, weights.tolist())
        gaps = self.gaps(state, cohort, updates, local, "gap", counted=False)
        record_gaps(cohort, updates, gaps, "gap")
        return self.store(state, cohort, updates, self.adjust(cohort, updates, weights, gaps))

    def adjust(
        self, cohort: Cohort, updates: Sequence[Update], weights: Vector, gaps: Vector, floor: float = 0.0
    ) -> Vector:
        """The weights after one step of at least `floor`; unchanged where a gap is not finite."""
        if not all_known(gaps, [u.client for u in updates]):
            return weights
        step = max(step_at(cohort.round + 1, cohort.rounds, self.step), floor)
        moved = weights_before_clipping(weights, gaps, step, self.center)
        cohort.measure(weights_clipped=0.0 if moved is None else outside(moved))
        adjusted: Vector = adjusted_weights(weights, gaps, step, self.center)
        return adjusted


def step_at(round: int, rounds: int, step: float) -> float:
    """Step size in a round.

    Args:
        round: Round number, from 1; the released code has a round 0 before.
        rounds: Total number of rounds.
        step: Step size in round 1.
    """
    return step - (round - 1) * step / rounds


def adjusted_weights(weights: Array, gaps: Array, step: float, center: bool = False) -> Array:
    """Weights after one step of GA, which raises the weights of clients with large gaps.

    The result is clipped to [0, 1] and scaled to sum 1. It equals `weights` where a gap is not finite, where
    all (centred) gaps are zero, or where all clipped weights are zero.

    Args:
        weights: Weights of the clients, >= 0 and summing to 1, shape (M,).
        gaps: Loss of the mean model minus the loss of the client's own model, shape (M,).
        step: Largest change of a weight before clipping: step / M, or with `center` step.
        center: Subtract the mean gap, as in the paper.
    """
    a = to_numpy(weights)
    g = to_numpy(gaps)
    moved = weights_before_clipping(a, g, step, center) if all_known(g) else None
    return like(a if moved is None else clip_to_simplex(moved, a), weights, gaps)


def weights_before_clipping(a: Vector, g: Vector, step: float, center: bool) -> Vector | None:
    """Weights after one step, before clipping; None where all (centred) gaps are zero."""
    g = g - g.mean() if center else g
    largest = np.abs(g).max()
    return None if largest < SMALLEST else a + g / largest * (step if center else step / len(a))


def record_gaps(cohort: Cohort, updates: Sequence[Update], gaps: Vector, name: str) -> None:
    """Add each client's gap to the table `gaps`, and their variance to the row of the round.

    The columns are `<name>_variance` (sum over pairs; FFT-GP, Eq. 6) and `<name>_population_variance`. Where
    gaps are not finite, the only column is `<name>_unknown`, the number of these gaps.
    """
    for update, gap in zip(updates, gaps, strict=True):
        cohort.record("gaps", client=update.client, model=name, gap=float(gap))
    unknown = int((~np.isfinite(gaps)).sum())
    if unknown:
        cohort.measure(**{f"{name}_unknown": unknown})
    else:
        cohort.measure(
            **{f"{name}_variance": variance(gaps), f"{name}_population_variance": float(gaps.var())}
        )


METHOD = Method(server=GeneralizationAdjustment, knob=Knob("server.step", 0.05, 0.8))
