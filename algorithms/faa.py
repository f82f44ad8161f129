"""FAA: aggregation weights under which all clients' generalization gaps become equal, by measured slopes.

Du et al., FFT-GP (federated fine-tuning: generalise and personalise), Algorithm 1 and Eq. 8 to 11. One GA
step perturbs all weights at once; how each gap answers gives its slope K, and the slopes give the weights.

Differs from the paper, which has no guards: slopes that are zero, negative or unknown, and weights outside
[0, 1] have rules; see `fairness_aware_weights`. The perturbation has a smallest step, so that slopes stay
above the noise at the end of a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from algorithms._arrays import Array, like, to_numpy
from algorithms._gaps import Vector, all_known, clipped, outside
from algorithms.ga import GeneralizationAdjustment, record_gaps
from rayfed.federation.cohort import Cohort
from rayfed.federation.method import Method
from rayfed.types import Count, NonNegative, ServerState, Update

FLAT = 1e-8
NegativeSlope: TypeAlias = Literal["zero", "abs", "keep"]


@dataclass(frozen=True)
class FairnessAware(GeneralizationAdjustment):
    """Two looks at the gaps, then one mean.

    Attributes:
        every: FAA in every such round, GA in the others.
        step_floor: Smallest step of the perturbation.
        k_negative: What a negative slope counts as; `abs` and `keep` are for study.
        compare: Also score the means of the same answers under FedAvg's weights and under the final ones, for
            the variances of FedAvg, GA and FAA; costs two more looks, which are not counted as traffic.
    """

    every: Count = 1
    step_floor: NonNegative = 0.05
    k_negative: NegativeSlope = "zero"
    compare: bool = False

    def aggregate(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> ServerState:
        if (cohort.round + 1) % self.every:
            return super().aggregate(state, cohort, updates)
        before = self.weights(state, cohort, updates)
        gaps = self._look(state, cohort, updates, before, "gap")
        moved = self.adjust(cohort, updates, before, gaps, self.step_floor)
        after, slopes = before, np.zeros_like(before)
        if not np.array_equal(moved, before):
            answered = self._look(state, cohort, updates, moved, "gap_ga")
            if all_known(answered, [u.client for u in updates]):
                slopes = slopes_of(before, gaps, moved, answered, self.k_negative)
                after = balanced(before, gaps, moved, slopes)
                cohort.measure(**guards(before, gaps, moved, answered, slopes))
        self._log(cohort, updates, slopes, after)
        if self.compare:
            self._look(state, cohort, updates, np.array(data_shares(updates)), "gap_fedavg", counted=False)
            self._look(state, cohort, updates, after, "gap_faa", counted=False)
        self.record_weights(cohort, updates, after.tolist())
        return self.store(self.average(state, updates, after.tolist()), cohort, updates, after)

    def _look(
        self,
        state: ServerState,
        cohort: Cohort,
        updates: Sequence[Update],
        weights: Vector,
        name: str,
        counted: bool = True,
    ) -> Vector:
        mean = self.average(state, updates, weights.tolist())
        gaps = self.gaps(mean, cohort, updates, counted, name)
        record_gaps(cohort, updates, gaps, name)
        return gaps

    def _log(self, cohort: Cohort, updates: Sequence[Update], slopes: Vector, after: Vector) -> None:
        cohort.measure(slopes_used=float((slopes > 0).sum()))
        for update, slope, weight in zip(updates, slopes, after, strict=True):
            cohort.record("fairness", client=update.client, slope=float(slope), weight=float(weight))


def data_shares(updates: Sequence[Update]) -> list[float]:
    """FedAvg's weights."""
    total = sum(u.num_examples for u in updates)
    return [u.num_examples / total for u in updates]


def fairness_aware_weights(
    weights: Array, gaps: Array, perturbed_weights: Array, perturbed_gaps: Array
) -> Array:
    """FAA's weights; FFT-GP, Eq. 9 to 11, with guards.

    A client whose gap does not answer, or answers the wrong way, keeps its weight and has no say in the
    common gap. Without any slope the perturbed weights are used. Weights are clipped to [0, 1] and scaled to
    sum 1. With a gap that is not a number the weights stay as they are.

    Args:
        weights: Before, shape (M,).
        gaps: Under these weights, shape (M,).
        perturbed_weights: After one GA step, shape (M,).
        perturbed_gaps: Under those, shape (M,).
    """
    given = (weights, gaps, perturbed_weights, perturbed_gaps)
    a, g, b, h = map(to_numpy, given)
    if not (all_known(g) and all_known(h)):
        return like(a, *given)
    return like(balanced(a, g, b, slopes_of(a, g, b, h)), *given)


def slopes_of(a: Vector, g: Vector, b: Vector, h: Vector, negative: NegativeSlope = "zero") -> Vector:
    """Change of a weight per fall of its gap, from weights a and gaps g to weights b and gaps h; Eq. 11."""
    fall = g - h
    answers = np.isfinite(fall) & (np.abs(fall) >= FLAT)
    slopes = np.where(answers, (b - a) / np.where(answers, fall, 1.0), 0.0)
    if negative == "keep":
        return slopes
    return np.abs(slopes) if negative == "abs" else np.maximum(slopes, 0.0)


def balanced(a: Vector, g: Vector, b: Vector, slopes: Vector) -> Vector:
    """Weights that would make all gaps equal if they were linear with these slopes; Eq. 9 and 10."""
    moved = unclipped(a, g, slopes)
    return b if moved is None else clipped(moved, b)


def unclipped(a: Vector, g: Vector, slopes: Vector) -> Vector | None:
    """Eq. 10 as it stands; None where the slopes sum to zero, so that there is no common gap."""
    total = slopes.sum()
    if abs(total) < FLAT:
        return None
    return a + slopes * (g - (slopes * g).sum() / total)


def guards(a: Vector, g: Vector, b: Vector, h: Vector, slopes: Vector) -> dict[str, float]:
    """How often each guard changed what Eq. 9 to 11 say, for the row of the round.

    Returns:
        slopes_flat and slopes_negative: clients whose gap did not answer, or the wrong way; weights_clipped:
        weights outside [0, 1]; fell_back: 1 where no slope was left and GA's weights are used.
    """
    moved = unclipped(a, g, slopes)
    return {
        "slopes_flat": float((np.abs(g - h) < FLAT).sum()),
        "slopes_negative": float((slopes_of(a, g, b, h, "keep") < 0).sum()),
        "weights_clipped": 0.0 if moved is None else outside(moved),
        "fell_back": float(moved is None),
    }


METHOD = Method(server=FairnessAware)
