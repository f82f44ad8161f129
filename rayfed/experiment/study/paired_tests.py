"""Paired tests between the rows of a study, as a table (`rayfed.evaluation.family_tests`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rayfed.columns import share_of
from rayfed.errors import ConfigError
from rayfed.evaluation.family_tests import run_family_tests

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("against", "difference", "low", "high", "p", "p_corrected", "seeds", "verdict", "seeds_needed")


def checked_margin(margin: float | None) -> float | None:
    """The margin.

    Raises:
        ConfigError: It is no positive number.
    """
    is_number = isinstance(margin, (int, float)) and not isinstance(margin, bool)
    if margin is not None and not (is_number and 0 < margin < math.inf):
        raise ConfigError(
            f"margin: {margin!r} is no positive number, such as 0.01 for one point of an accuracy"
        )
    return margin


def check_share(margin: float | None, metric: str) -> float | None:
    """The margin, which is below 1 for a share such as an accuracy.

    Raises:
        ConfigError: It is not, as where points were meant.
    """
    if margin is not None and margin >= 1 and share_of(metric) != 1:
        raise ConfigError(
            f"margin: {margin:g} is {100 * margin:g} points of {metric}; it is in the unit of the score: "
            f"write {margin / 100:g} for {margin:g} points"
        )
    return margin


def paired_tests(
    scores: pd.DataFrame,
    pairs: Sequence[tuple[str, str]],
    larger: bool,
    level: float,
    margin: float | None = None,
    same: Collection[tuple[str, str]] = (),
) -> pd.DataFrame:
    """A test of each pair of rows, over the seeds that both have.

    The unit is a seed: the scores of a seed are already means over its parts.

    Args:
        scores: A row for each seed, a column for each row of the study.
        pairs: The tested rows, and what each is compared with.
        larger: Larger scores are better.
        level: Probability that all intervals contain their true differences.
        margin: Largest difference between rows that are as good as each other; None: none are.
        same: Pairs whose runs have the same bytes, which are not tested.

    Returns:
        One row for each pair: `against`; `difference`, its mean; `low` and `high`, its interval; `p` of its
        moderated t-test, and `p_corrected` for all pairs; `seeds`, their number; `verdict`, and for an open
        one `seeds_needed`, as in `rayfed.evaluation.family_tests.PairedTest`. `attrs["family"]` is the tested
        family.
    """
    import pandas as pd

    found = [(scores[one] - scores[other]).dropna() for one, other in pairs]
    family = run_family_tests(
        [dict(values) for values in found],
        larger=larger,
        margin=margin,
        level=level,
        same=[pair in same for pair in pairs],
    )
    rows = [
        {
            "against": other,
            "difference": each.difference,
            "low": each.low,
            "high": each.high,
            "p": each.p,
            "p_corrected": each.p_corrected,
            "seeds": each.seeds,
            "verdict": each.verdict,
            "seeds_needed": each.needed,
        }
        for (_, other), each in zip(pairs, family.tests, strict=True)
    ]
    table = pd.DataFrame(rows, index=pd.Index([one for one, _ in pairs]), columns=list(COLUMNS))
    numbers = ["difference", "low", "high", "p", "p_corrected", "seeds_needed"]
    table[numbers] = table[numbers].astype(float)
    table.attrs["family"] = family
    return table
