"""FAA: aggregation weights that make the generalization gaps of all clients equal.

Zhang, Fan, Yao, Zhang, Wang, FFT-GP, FITEE 2024 [zhang2024fftgp], section 3.3.1, Algorithm 1 and Eq. 8 to 11.
One GA step perturbs all weights at once. The change of each gap gives its slope K, and the slopes give the
final weights.

Differs from the paper: slopes that are zero, negative or unknown, and weights outside [0, 1] are treated by
the rules of `fairness_aware_weights`; the paper has none. The step of the perturbation has a lower bound, so
that slopes are not dominated by noise at the end of a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import numpy as np

from algorithms._arrays import Array, like, to_numpy
from algorithms._gaps import Vector, all_known, clip_to_simplex, outside
from algorithms.afl import project_to_simplex
from algorithms.ga import GeneralizationAdjustment, record_gaps
from rayfed import Cohort, Knob, Local, Method, ServerState, Update
from rayfed.types import Count, NonNegative

FLAT = 1e-8
"""Smallest change of a gap that gives a slope, and smallest sum of slopes that is not treated as zero."""

NegativeSlope: TypeAlias = Literal["zero", "abs", "keep"]
Repair: TypeAlias = Literal["clip", "project"]


@dataclass(frozen=True)
class FairnessAware(GeneralizationAdjustment):
    """Measures the gaps twice, computes the weights, and averages the updates once.

    Attributes:
        every: FAA is used in every n-th round, GA in the others.
        step_floor: Lower bound of the step of the perturbation.
        k_negative: Treatment of a negative slope: set to zero, absolute value, or kept; the last two are for
            ablations.
        off_simplex: Treatment of weights outside [0, 1]: all weights are clipped and scaled to sum 1, as in
            GA, or replaced by the nearest point of the simplex.
        compare: Also measure the gaps of the means of the same updates under FedAvg's weights and under the
            final weights, to compare the variances of FedAvg, GA and FAA. The two additional exchanges are
            not counted as traffic.
    """

    every: Count = 1
    step_floor: NonNegative = 0.05
    k_negative: NegativeSlope = "zero"
    off_simplex: Repair = "clip"
    compare: bool = False

    def aggregate(
        self, state: ServerState, cohort: Cohort, updates: Sequence[Update], local: Local | None = None
    ) -> ServerState:
        if (cohort.round + 1) % self.every:
            return super().aggregate(state, cohort, updates, local)
        measure = partial(self._measure, state, cohort, updates, local)
        before = self.weights(state, cohort, updates)
        gaps = measure(before, "gap")
        moved = self.adjust(cohort, updates, before, gaps, self.step_floor)
        after = before
        slopes = np.zeros_like(before)
        if not np.array_equal(moved, before):
            gaps_moved = measure(moved, "gap_ga")
            if all_known(gaps_moved, [u.client for u in updates]):
                given = (before, gaps, moved, gaps_moved)
                after = fairness_aware_weights(*given, self.k_negative, self.off_simplex)
                slopes = slopes_of(before, gaps, moved, gaps_moved, self.k_negative)
                cohort.measure(**guards(before, gaps, moved, gaps_moved, slopes))
        self._log(cohort, updates, slopes, after)
        if self.compare:
            measure(np.array(data_shares(updates)), "gap_fedavg", counted=False)
            measure(after, "gap_faa", counted=False)
        self.record_weights(cohort, updates, after.tolist())
        return self.store(self.average(state, updates, after.tolist()), cohort, updates, after)

    def _measure(
        self,
        state: ServerState,
        cohort: Cohort,
        updates: Sequence[Update],
        local: Local | None,
        weights: Vector,
        name: str,
        counted: bool = True,
    ) -> Vector:
        """Gaps of the mean model under these weights, recorded under `name`."""
        mean = self.average(state, updates, weights.tolist())
        gaps = self.gaps(mean, cohort, updates, local, name, counted)
        record_gaps(cohort, updates, gaps, name)
        return gaps

    def _log(self, cohort: Cohort, updates: Sequence[Update], slopes: Vector, after: Vector) -> None:
        cohort.measure(slopes_used=float((slopes > 0).sum()))
        for update, slope, weight in zip(updates, slopes, after, strict=True):
            cohort.record("fairness", client=update.client, slope=float(slope), weight=float(weight))


def data_shares(updates: Sequence[Update]) -> list[float]:
    """FedAvg's weights: the share of each client in the training examples."""
    total = sum(u.num_examples for u in updates)
    return [u.num_examples / total for u in updates]


def fairness_aware_weights(
    weights: Array,
    gaps: Array,
    perturbed_weights: Array,
    perturbed_gaps: Array,
    negative: NegativeSlope = "zero",
    off_simplex: Repair = "clip",
) -> Array:
    """FAA's weights; FFT-GP, Eq. 9 to 11, with rules for the cases that the paper leaves open.

    A client whose slope is zero keeps its weight and does not enter the common gap; by default a negative
    slope is set to zero. Where all slopes are zero the perturbed weights are returned. Where a gap is not
    finite, `weights` is returned.

    Args:
        weights: Weights before, shape (M,).
        gaps: Gaps under these weights, shape (M,).
        perturbed_weights: Weights after one GA step, shape (M,).
        perturbed_gaps: Gaps under the perturbed weights, shape (M,).
        negative: Treatment of negative slopes.
        off_simplex: Treatment of weights outside [0, 1]: `clip` them and scale all to sum 1, or `project` the
            weights onto the simplex (`algorithms.afl.project_to_simplex`).
    """
    given = (weights, gaps, perturbed_weights, perturbed_gaps)
    a, g, b, h = map(to_numpy, given)
    if not (all_known(g) and all_known(h)):
        return like(a, *given)
    return like(balance(a, g, b, slopes_of(a, g, b, h, negative), off_simplex), *given)


def slopes_of(a: Vector, g: Vector, b: Vector, h: Vector, negative: NegativeSlope = "zero") -> Vector:
    """Slopes K, Eq. 11: increase of a client's weight divided by the decrease of its gap.

    Args:
        a: Weights before the perturbation, shape (M,).
        g: Gaps under a.
        b: Weights after the perturbation.
        h: Gaps under b.
        negative: Treatment of negative slopes.

    Returns:
        One slope per client; 0 where the gap changed by less than FLAT or is not finite.
    """
    fall = g - h
    changed = np.isfinite(fall) & (np.abs(fall) >= FLAT)
    slopes = np.where(changed, (b - a) / np.where(changed, fall, 1.0), 0.0)
    if negative == "keep":
        return slopes
    return np.abs(slopes) if negative == "abs" else np.maximum(slopes, 0.0)


def balance(a: Vector, g: Vector, b: Vector, slopes: Vector, off_simplex: Repair = "clip") -> Vector:
    """Weights that make all gaps equal if they are linear in the weights, Eq. 9 and 10, within the simplex.

    Where the slopes sum to zero, the perturbed weights b are returned.
    """
    moved = weights_before_clipping(a, g, slopes)
    if moved is None:
        return b
    return project_to_simplex(moved) if off_simplex == "project" else clip_to_simplex(moved, b)


def weights_before_clipping(a: Vector, g: Vector, slopes: Vector) -> Vector | None:
    """Weights of Eq. 10 before clipping; None where the slopes sum to zero, so that no common gap exists."""
    total = slopes.sum()
    if abs(total) < FLAT:
        return None
    return a + slopes * (g - (slopes * g).sum() / total)


def guards(a: Vector, g: Vector, b: Vector, h: Vector, slopes: Vector) -> dict[str, float]:
    """Number of times each rule of `fairness_aware_weights` changed the result of Eq. 9 to 11.

    Returns:
        slopes_flat: clients whose gap did not change; slopes_negative: clients whose slope is negative;
        weights_clipped: weights outside [0, 1]; fell_back: 1 where all slopes are zero and GA's weights are
        used.
    """
    moved = weights_before_clipping(a, g, slopes)
    return {
        "slopes_flat": float((np.abs(g - h) < FLAT).sum()),
        "slopes_negative": float((slopes_of(a, g, b, h, "keep") < 0).sum()),
        "weights_clipped": 0.0 if moved is None else outside(moved),
        "fell_back": float(moved is None),
    }


METHOD = Method(server=FairnessAware, knob=Knob("server.step", 0.05, 0.8))
