"""Tests of a family of paired differences: simultaneous intervals, verdicts, and what they can resolve.

The unit of repetition is a seed with its partition. The variance of each difference is moderated by those of
its family (Smyth, Linear models and empirical Bayes methods for assessing differential expression, 2004,
[smyth2004moderated], Eq. 1 and section 6.2), and all intervals of a family contain their true differences
together with a probability of `level` (Westfall and Young, Resampling-based multiple testing, 1993,
[westfall1993resampling]: the least p of a family).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from rayfed.errors import count_of

Array = npt.NDArray[np.float64]

Verdict: TypeAlias = Literal["better", "worse", "as good", "open", "same"]

VERDICTS: tuple[Verdict, ...] = ("better", "worse", "as good", "open")
"""Verdicts of a difference that is not 0 in every seed; else it is `same`."""

MARGIN = 0.01
"""Largest difference of a share, such as an accuracy, between rows that count as equally good."""

LEVEL = 0.95
"""Probability that all intervals of a family contain their true differences."""

ENOUGH_SEEDS = 8
"""Seeds from which on the family's own seeds are resampled; fewer have fewer than 128 patterns of signs."""

FEWEST_VARIANCES = 3
"""Differences of a family from which on their variances moderate each other."""

MOST_PRIOR = 4.0
"""Most degrees of freedom that a family adds to a variance, as a multiple of the difference's own."""

DRAWS = 4000
"""Number of resamplings, and of simulated families in each case."""

HETEROGENEITY = (1.0, 2.0, 4.0, 8.0, math.inf)
"""Degrees of freedom of the distribution of variances in simulated families; infinite: all are equal."""

SHARED = (0.0, 0.5, 0.8)
"""Correlations between the differences of simulated families; 0.5 is that of a common reference."""

POWER = 0.8
"""Probability with which the number of seeds that is named for an open test decides it."""

MOST_SEEDS = 1000
"""Largest number of seeds that is named."""

NEGLIGIBLE = 1e-6
"""Variances below this multiple of the family's median say nothing about those of other differences."""

FLIPPED, SIMULATED, ALONE = (
    "signs of whole seeds drawn again",
    "least favourable of simulated families",
    "paired t-test",
)
"""Ways in which the common critical value of a family is found."""


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """A difference of two rows over seeds.

    Attributes:
        difference: Its mean; None: no seed has both rows.
        low, high: Its simultaneous interval; None for fewer than two seeds, or where no deviation is known.
        p: Of the moderated t-test alone. Where no deviation is known, of the signs.
        p_corrected: The same for the family: 0 is outside of the interval where it is below 1 - level.
        seeds: Number of seeds that both rows have.
        needed: Number of seeds that would decide an open test with a probability of `POWER`, if difference
            and deviation are those found; None: it is decided, or more than `MOST_SEEDS`.
        verdict: `better`: the interval is on the better side of 0; `worse`: on the other one; `as good`: it
            is within the margin; `open`: none of these; `same`: the difference is exactly 0 in every seed, or
            is not tested, as both rows have the same bytes.
    """

    difference: float | None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_corrected: float | None = None
    seeds: int
    needed: int | None = None
    verdict: Verdict

    @property
    def half_width(self) -> float | None:
        """Half of the interval: a smaller difference cannot be seen."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


@dataclass(frozen=True)
class TestedFamily:
    """The tests of a family, in the order of its differences, and how its critical value was found."""

    tests: Sequence[PairedTest]
    how: str

    @property
    def resolution(self) -> tuple[float, float] | None:
        """Median and largest half of an interval; None: there is none."""
        found = [half for each in self.tests if (half := each.half_width) is not None]
        return (median(found), max(found)) if found else None


Differences: TypeAlias = Mapping[int, float] | Sequence[float]
"""Differences by seed; a sequence is that of the seeds 0, 1, ..."""


def run_family_tests(
    differences: Sequence[Differences],
    *,
    larger: bool = True,
    margin: float | None = None,
    level: float = LEVEL,
    same: Sequence[bool] | None = None,
) -> TestedFamily:
    """Test each difference of a family, over its seeds.

    The variance of a difference is s~^2 = (d_0 s_0^2 + d s^2) / (d_0 + d), where d is its number of seeds
    less one, and d_0 and s_0^2 are estimated from the variances of the family; d_0 is at most `MOST_PRIOR` d,
    since a reference that all differences share makes their variances look alike. Families of fewer than
    `FEWEST_VARIANCES` have d_0 = 0. Each p is of t = mean / (s~ / sqrt(seeds)) with d_0 + d degrees of
    freedom. The critical value of p is the quantile 1 - `level` of the family's least p where no difference
    exists: from `ENOUGH_SEEDS` seeds on the signs of whole seeds of the centred differences are drawn again,
    which keeps their correlation. With fewer seeds, or other seeds for other rows, there are too few patterns
    of signs: then it is the least one of simulated normal families of this size, with variances from equal to
    widely different (`HETEROGENEITY`) and correlations from none to strong (`SHARED`). One difference has the
    ordinary paired t-test. The random numbers have the seed 0: the same differences have the same intervals.

    Args:
        differences: By pair of rows, their differences by seed.
        larger: Larger differences are better.
        margin: Largest difference between rows that count as equally good; None: none do.
        level: Probability that all intervals contain their true differences.
        same: Pairs of the same bytes, which are not tested; None: there is none. Pairs whose difference is
            exactly 0 in every seed belong to the family, and are `same`, too.
    """
    by_seed = [dict(each) if isinstance(each, Mapping) else dict(enumerate(each)) for each in differences]
    same = same if same is not None else [False] * len(by_seed)
    places = [place for place, each in enumerate(by_seed) if len(each) > 1 and not same[place]]
    tested = [by_seed[place] for place in places]
    means = np.array([np.mean(list(each.values())) for each in tested])
    seeds = np.array([len(each) for each in tested], dtype=float)
    variances = np.array([_variance(np.array(list(each.values()))) for each in tested])
    prior, common = _prior(variances, seeds - 1)
    moderated, freedom = _moderate(variances, seeds - 1, prior, common)
    p = _p_of(means, np.sqrt(moderated / np.maximum(seeds, 1)), freedom)
    null, how = _null(tested)
    critical = _critical(null, 1 - level)
    asked = _Asked(larger=larger, margin=margin, level=level, size=len(tested))
    found: dict[int, PairedTest] = {}
    for place, mean, n, s2, df, own in zip(places, means, seeds, moderated, freedom, p, strict=True):
        found[place] = _test(mean, int(n), math.sqrt(s2), df, own, null, critical, asked)
        if not any(by_seed[place].values()):
            found[place] = replace(found[place], verdict="same", needed=None)
    every = [
        found.get(place)
        or PairedTest(
            difference=float(np.mean(list(each.values()))) if each else None,
            seeds=len(each),
            verdict="same" if same[place] or (each and not any(each.values())) else "open",
        )
        for place, each in enumerate(by_seed)
    ]
    return TestedFamily(every, how)


def resolution_in_words(family: TestedFamily, unit: str = "", factor: float = 1.0) -> str:
    """A note on the differences that a family's seeds cannot resolve; empty where nothing is tested.

    Args:
        unit: Unit of a difference, with a space before it.
        factor: Factor of the differences in this unit.
    """
    if family.resolution is None:
        return ""
    middle, largest = (f"{factor * value:.3g}" for value in family.resolution)
    seeds = sorted({each.seeds for each in family.tests if each.half_width is not None})
    many = count_of(seeds[0], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    apart = f"{middle} (median) to {largest} (largest)" if middle != largest else middle
    return f"{many} resolve differences of {apart}{unit} or more here"


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """Direction, margin and level as of `run_family_tests`, and the number of tested differences."""

    larger: bool
    margin: float | None
    level: float
    size: int


def _test(
    mean: float,
    seeds: int,
    deviation: float,
    freedom: float,
    p: float,
    null: Sequence[Array],
    critical: float,
    asked: _Asked,
) -> PairedTest:
    """The test of one difference."""
    from scipy.stats import t

    margin = asked.margin
    if deviation == 0:
        corrected = min(1.0, asked.size * p)
        sign = 0.0 if corrected >= 1 - asked.level else math.copysign(1.0, mean)
        low = high = None
    else:
        half = float(t.isf(critical / 2, freedom)) * deviation / math.sqrt(seeds)
        low, high = mean - half, mean + half
        corrected = max(p, _corrected(p, null))
        sign = float(low > 0) - float(high < 0)
    verdict: Verdict = "open"
    if sign:
        verdict = "better" if (sign > 0) == asked.larger else "worse"
    elif margin is not None and low is not None and high is not None and max(-low, high) <= margin:
        verdict = "as good"
    needed = None
    if verdict == "open" and deviation > 0:
        needed = _seeds_needed(mean, deviation, seeds, freedom, asked)
    return PairedTest(
        difference=float(mean),
        low=None if low is None else float(low),
        high=None if high is None else float(high),
        p=float(p),
        p_corrected=float(corrected),
        seeds=seeds,
        needed=needed,
        verdict=verdict,
    )


def _seeds_needed(mean: float, deviation: float, seeds: int, freedom: float, asked: _Asked) -> int | None:
    """Least number of seeds that decides with a probability of `POWER`, by Bonferroni's critical value."""
    from scipy.stats import norm, t

    reach = max(abs(mean), (asked.margin or 0.0) - abs(mean))
    more = np.arange(seeds + 1, MOST_SEEDS + 1)
    prior = freedom / (seeds - 1)
    critical = t.isf((1 - asked.level) / (2 * asked.size), prior * (more - 1))
    enough = (critical + norm.ppf(POWER)) * deviation / np.sqrt(more) <= reach
    return int(more[enough][0]) if enough.any() else None


def _variance(values: Array) -> float:
    """Sample variance; 0 where all are equal, but for rounding."""
    if np.ptp(values) <= 1e-12 * max(1.0, float(np.abs(values).max())):
        return 0.0
    return float(values.var(ddof=1))


def _prior(variances: Array, freedom: Array) -> tuple[Array, Array]:
    """Degrees of freedom and value of the variance around which those of a family lie (Smyth, section 6.2).

    Variances of 0, or near it, are left out. With fewer than `FEWEST_VARIANCES` others the degrees are 0.

    Args:
        variances: Shape (..., differences).
        freedom: Their own degrees of freedom, shape (differences) or (1).

    Returns:
        Both of shape (...); the degrees are infinite where the variances differ by no more than chance.
    """
    from scipy.special import digamma, polygamma

    shape = variances.shape[:-1]
    if variances.shape[-1] < FEWEST_VARIANCES:
        return np.zeros(shape), np.ones(shape)
    known = variances > NEGLIGIBLE * np.median(variances, axis=-1, keepdims=True)
    count = known.sum(axis=-1)
    least = np.maximum(count, 2)
    half = freedom / 2
    logs = np.where(known, np.log(np.where(known, variances, 1.0)) - digamma(half) + np.log(half), 0.0)
    middle = logs.sum(axis=-1) / least
    spread = (np.where(known, logs - middle[..., None], 0.0) ** 2).sum(axis=-1) / (least - 1)
    more = spread - np.where(known, polygamma(1, half), 0.0).sum(axis=-1) / least
    differ = more > 1e-3
    prior_half = _inverse_trigamma(np.where(differ, more, 1.0))
    prior = np.where(differ, 2 * prior_half, np.inf)
    common = np.exp(middle + np.where(differ, digamma(prior_half) - np.log(prior_half), 0.0))
    enough = count >= FEWEST_VARIANCES
    return np.where(enough, prior, 0.0), np.where(enough, common, 1.0)


def _inverse_trigamma(values: Array) -> Array:
    """The x with trigamma(x) = value, by Newton's method on 1 / trigamma (Smyth, appendix)."""
    from scipy.special import polygamma

    x = 0.5 + 1 / values
    for _ in range(10):
        y = polygamma(1, x)
        x = x + y * (1 - y / values) / polygamma(2, x)
    return np.asarray(x, dtype=float)


def _moderate(variances: Array, freedom: Array, prior: Array, common: Array) -> tuple[Array, Array]:
    """Moderated variances and their degrees of freedom, shape (..., differences)."""
    added = np.minimum(prior[..., None], MOST_PRIOR * freedom)
    total = added + freedom
    return (added * common[..., None] + freedom * variances) / total, total


def _p_of(means: Array, errors: Array, freedom: Array) -> Array:
    """Two-sided p of t-tests; without an error, of the signs of equal differences."""
    from scipy.special import stdtr

    tails = 2 * stdtr(freedom, -np.abs(means) / np.where(errors > 0, errors, 1.0))
    signs = np.where(np.abs(means) <= 1e-12, 1.0, 2.0**-freedom)
    return np.asarray(np.where(errors > 0, tails, signs), dtype=float)


def _least_p(means: Array, variances: Array, seeds: int) -> Array:
    """Least p of each family. Args: means, variances: of the differences, shape (families, differences)."""
    freedom = np.array([seeds - 1.0])
    moderated, total = _moderate(variances, freedom, *_prior(variances, freedom))
    errors = np.sqrt(moderated / seeds)
    t = np.abs(means) / np.where(errors > 0, errors, np.inf)
    # All of a family have the same degrees of freedom.
    return _p_of(t.max(axis=-1), np.ones(len(t)), total[..., 0])


def _null(tested: Sequence[Mapping[int, float]]) -> tuple[Sequence[Array], str]:
    """Sorted least p of families without differences, in each possible case, and how they were made."""
    if len(tested) < 2:
        return (), ALONE
    fewest = min(map(len, tested))
    if fewest < ENOUGH_SEEDS or any(each.keys() != tested[0].keys() for each in tested):
        return _simulated(fewest, len(tested)), SIMULATED
    values = np.array([[each[seed] for seed in tested[0]] for each in tested])
    return (_flipped(values),), FLIPPED


def _flipped(values: Array) -> Array:
    """Sorted least p of a family whose centred differences have the signs of whole seeds drawn again.

    Centred differences have (n - 1) / n of the variance of n differences; they are stretched to all of it.

    Args:
        values: The differences, shape (differences, seeds).
    """
    seeds = values.shape[-1]
    centred = values - values.mean(axis=-1, keepdims=True)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (DRAWS, seeds))
    means = signs @ centred.T / seeds
    squares = (centred**2).sum(axis=-1)
    variances = np.maximum(squares - seeds * means**2, 0.0) / (seeds - 1)
    return np.sort(_least_p(means * math.sqrt(seeds / (seeds - 1)), variances, seeds))


@cache
def _simulated(seeds: int, size: int) -> tuple[Array, ...]:
    """Sorted least p of normal families without differences, in each case of variances and correlation."""
    rng = np.random.default_rng(0)
    found = []
    for spread in HETEROGENEITY:
        for shared in SHARED:
            scale = np.ones((DRAWS, size, 1))
            if math.isfinite(spread):
                scale = np.sqrt(spread / rng.chisquare(spread, scale.shape))
            common = rng.normal(size=(DRAWS, 1, seeds))
            own = rng.normal(size=(DRAWS, size, seeds))
            values = scale * (math.sqrt(shared) * common + math.sqrt(1 - shared) * own)
            found.append(np.sort(_least_p(values.mean(axis=-1), values.var(axis=-1, ddof=1), seeds)))
    return tuple(found)


def _critical(null: Sequence[Array], alpha: float) -> float:
    """The p below which a difference is shown, with an error of `alpha` for the family in the worst case."""
    place = max(0, math.ceil(alpha * (DRAWS + 1)) - 1)
    return min([alpha, *(float(each[min(place, len(each) - 1)]) for each in null)])


def _corrected(p: float, null: Sequence[Array]) -> float:
    """Probability of a least p of at most this one in a family without differences, in the worst case."""
    return max(
        (float((1 + np.searchsorted(each, p)) / (len(each) + 1)) for each in null),
        default=p,
    )
