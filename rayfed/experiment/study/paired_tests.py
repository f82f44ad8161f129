"""Paired tests between the rows of a study: differences by seed, corrected p, simultaneous intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rayfed.evaluation.metrics import holm

if TYPE_CHECKING:
    import pandas as pd

ENOUGH_SEEDS = 5
"""Seeds from which on intervals are made from resampled seeds."""

DRAWS = 4000
"""Number of resamplings."""

Array = npt.NDArray[np.float64]

RESAMPLED, BONFERRONI = "max-|t| over resampled seeds", "Bonferroni t"


def paired_tests(
    scores: pd.DataFrame, pairs: Sequence[tuple[str, str]], larger: bool, level: float
) -> pd.DataFrame:
    """A test of each pair of rows, over the seeds that both have.

    The unit is a seed: the scores of a seed are already means over its parts.

    Args:
        scores: A row for each seed, a column for each row of the study.
        pairs: The tested rows, and what each is compared with.
        larger: Larger scores are better.
        level: Probability that all intervals contain their true differences.

    Returns:
        One row for each pair: `against`; `difference`, its mean; `low` and `high`, its interval, none where
        all seeds have the same difference; `p` of a two-sided paired t-test, and `p_corrected` by Holm over
        all pairs; `seeds`, their number; `verdict`: `better` or `worse` where `p_corrected` is below
        1 - `level`, else `undecided`.
    """
    import pandas as pd

    found = [(scores[one] - scores[other]).dropna() for one, other in pairs]
    factors, interval = _factors(found, level)
    rows: list[dict[str, Any]] = []
    for (_, other), values, factor in zip(pairs, found, factors, strict=True):
        mean, error = mean_and_error(values.to_numpy())
        has_test = len(values) > 1
        has_interval = has_test and (error > 0 or abs(mean) <= 1e-12)
        rows.append(
            {
                "against": other,
                "difference": mean if len(values) else None,
                "low": mean - factor * error if has_interval else None,
                "high": mean + factor * error if has_interval else None,
                "p": _p(mean, error, len(values)) if has_test else None,
                "seeds": len(values),
            }
        )
    corrected = holm({place: row["p"] for place, row in enumerate(rows) if row["p"] is not None})
    for place, row in enumerate(rows):
        row["p_corrected"] = corrected.get(place)
        row["verdict"] = _verdict(row["difference"], row["p_corrected"], larger, 1 - level)
    columns = ["against", "difference", "low", "high", "p", "p_corrected", "seeds", "verdict"]
    table = pd.DataFrame(rows, index=pd.Index([one for one, _ in pairs]), columns=columns)
    numbers = ["difference", "low", "high", "p", "p_corrected"]
    table[numbers] = table[numbers].astype(float)
    table.attrs["intervals"] = interval
    return table


def mean_and_error(values: Array) -> tuple[float, float]:
    """Mean of differences, and its standard error; 0 where all are the same."""
    if not len(values):
        return 0.0, 0.0
    mean = float(values.mean())
    if len(values) == 1 or np.ptp(values) <= 1e-12 * max(1.0, abs(mean)):  # equal, but for rounding
        return mean, 0.0
    return mean, float(values.std(ddof=1) / np.sqrt(len(values)))


def p_of_t(t: float, seeds: int) -> float:
    """P of a two-sided paired t-test. Args: t: the mean difference in standard errors."""
    from scipy.stats import t as student

    return float(2 * student.sf(abs(t), seeds - 1))


def _p(mean: float, error: float, seeds: int) -> float:
    """P of a two-sided t-test; of a sign test where the differences of all seeds are equal."""
    if error == 0:
        return 1.0 if abs(mean) <= 1e-12 else float(2.0 ** (1 - seeds))
    return p_of_t(mean / error, seeds)


def _verdict(difference: float | None, p: float | None, larger: bool, level: float) -> str:
    if p is None or difference is None or p >= level:
        return "undecided"
    return "better" if (difference > 0) == larger else "worse"


def _factors(differences: Sequence[pd.Series[float]], level: float) -> tuple[list[float], str]:
    """By how many standard errors each interval reaches to both sides, and how that was found."""
    from scipy.stats import t

    count = max(1, len(differences))
    seeds = [len(values) for values in differences]
    bonferroni = [
        float(t.ppf(1 - (1 - level) / (2 * count), number - 1)) if number > 1 else 0.0 for number in seeds
    ]
    same = bool(seeds) and all(values.index.equals(differences[0].index) for values in differences)
    if not same or seeds[0] < ENOUGH_SEEDS:
        return bonferroni, BONFERRONI
    one = float(t.ppf((1 + level) / 2, seeds[0] - 1))
    drawn = _largest_t(np.stack([values.to_numpy() for values in differences], axis=1), level)
    return [min(max(drawn, one), bonferroni[0])] * count, RESAMPLED


def _largest_t(values: Array, level: float) -> float:
    """Quantile of the largest |t| of all differences, where whole seeds are drawn with replacement.

    Args:
        values: The differences, shape (seeds, pairs).
        level: The quantile.
    """
    values = values[:, np.ptp(values, axis=0) > 1e-12]
    if not values.size:
        return 0.0
    rng = np.random.default_rng(0)  # the same intervals whenever they are computed
    drawn = values[rng.integers(0, len(values), (DRAWS, len(values)))]
    error = drawn.std(axis=1, ddof=1) / np.sqrt(len(values))
    known = (error > 0).all(axis=1)
    if not known.any():
        return float("inf")
    distance = np.abs(drawn.mean(axis=1) - values.mean(axis=0))[known]
    return float(np.quantile((distance / error[known]).max(axis=1), level))
