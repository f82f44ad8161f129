"""GA: clients that lose more by taking the mean model get larger weights in the next round.

Zhang et al., Federated Domain Generalization with Generalization Adjustment, CVPR 2023, Eq. 5, and code.

Differs from the code: losses instead of accuracies, a step of d / M instead of d / 3, T rounds instead of
T + 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from algorithms._arrays import Array, like, to_numpy
from algorithms._gaps import GapServer, Vector, all_known, clipped, outside, variance
from rayfed.federation.cohort import Cohort
from rayfed.federation.method import Method
from rayfed.types import Positive, ServerState, Update

SMALLEST = 1e-12


@dataclass(frozen=True)
class GeneralizationAdjustment(GapServer):
    """The weights of a round come from the gaps of the round before.

    Attributes:
        step: Step size d in the first round; it falls linearly to d / rounds.
        center: Subtract the mean gap first, as in the paper; the code does not.
    """

    step: Positive = 0.2
    center: bool = False

    def aggregate(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> ServerState:
        weights = self.weights(state, cohort, updates)
        self.record_weights(cohort, updates, weights.tolist())
        state = self.average(state, updates, weights.tolist())
        gaps = self.gaps(state, cohort, updates, counted=False, tag="gap")
        record_gaps(cohort, updates, gaps, "gap")
        return self.store(state, cohort, updates, self.adjust(cohort, updates, weights, gaps))

    def adjust(
        self, cohort: Cohort, updates: Sequence[Update], weights: Vector, gaps: Vector, floor: float = 0.0
    ) -> Vector:
        """The weights one step on; unchanged where a gap is not a number."""
        if not all_known(gaps, [u.client for u in updates]):
            return weights
        step = max(step_at(cohort.round + 1, cohort.rounds, self.step), floor)
        moved = unclipped(weights, gaps, step, self.center)
        cohort.measure(weights_clipped=0.0 if moved is None else outside(moved))
        return weights if moved is None else clipped(moved, weights)


def step_at(round: int, rounds: int, step: float) -> float:
    """Step size in round 1, 2, ... of `rounds`; the code has a round 0 before them."""
    return step - (round - 1) * step / rounds


def adjusted_weights(weights: Array, gaps: Array, step: float, center: bool = False) -> Array:
    """GA's step: larger gaps, larger weights; clipped to [0, 1], scaled to sum 1.

    Weights stay as they are where a gap is not a number, where all (centred) gaps are zero, and where nothing
    would be left.

    Args:
        weights: Of each client, >= 0 and summing to 1, shape (M,).
        gaps: Loss of the mean model minus loss of the client's own, shape (M,).
        step: Without centring, the largest change of a weight is step / M.
        center: Subtract the mean gap; the largest change is then step, as in the paper.
    """
    a, g = to_numpy(weights), to_numpy(gaps)
    moved = unclipped(a, g, step, center) if all_known(g) else None
    return like(a if moved is None else clipped(moved, a), weights, gaps)


def unclipped(a: Vector, g: Vector, step: float, center: bool) -> Vector | None:
    """GA's step as it stands; None where all (centred) gaps are zero."""
    g = g - g.mean() if center else g
    largest = np.abs(g).max()
    return None if largest < SMALLEST else a + g / largest * (step if center else step / len(a))


def record_gaps(cohort: Cohort, updates: Sequence[Update], gaps: Vector, name: str) -> None:
    """Add each client's gap to the table `gaps`, and their variance to the row of the round.

    Both the sum over pairs (FFT-GP, Eq. 6) and the population variance; with gaps that are not numbers their
    count instead.
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


METHOD = Method(server=GeneralizationAdjustment)
