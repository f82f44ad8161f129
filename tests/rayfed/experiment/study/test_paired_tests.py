"""Tests of a family: no verdict without a difference, one where it was planted, and intervals that hold."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t, ttest_rel

from rayfed.experiment.study.paired_tests import BONFERRONI, RESAMPLED, paired_tests


def scores(seeds, effects, seed=0):
    """Scores of rows that share what is hard about a seed; `effects` are their true differences."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(0, 1, (seeds, 1))
    values = shared + np.array(effects) + rng.normal(0, 0.1, (seeds, len(effects)))
    return pd.DataFrame(values, columns=list("abcdefgh")[: len(effects)], index=range(seeds))


def pairs(frame):
    return [(name, "a") for name in frame.columns[1:]]


def test_p_values_are_those_of_scipy_and_corrected_by_holm():
    frame = scores(6, [0, 0.05, 0.3])
    found = paired_tests(frame, pairs(frame), larger=True, level=0.95)
    for name in ("b", "c"):
        assert found.loc[name, "p"] == pytest.approx(ttest_rel(frame[name], frame["a"]).pvalue)
    assert found["p_corrected"].tolist() == pytest.approx(
        [max(found["p"]["b"], min(1, 2 * found["p"]["c"])), 2 * found["p"]["c"]]
    )
    assert found["verdict"].tolist() == ["undecided", "better"]
    worse = paired_tests(frame, pairs(frame), larger=False, level=0.95)
    assert worse["verdict"].tolist() == ["undecided", "worse"]


@pytest.mark.parametrize(("seeds", "how"), [(3, BONFERRONI), (5, RESAMPLED), (10, RESAMPLED)])
def test_a_family_of_equals_has_no_verdict_and_its_intervals_hold_together(seeds, how):
    """Of 60 families of five rows without differences, few have one interval that misses 0."""
    missed = 0
    for seed in range(60):
        frame = scores(seeds, [0] * 6, seed)
        found = paired_tests(frame, pairs(frame), larger=True, level=0.95)
        assert found.attrs["intervals"] == how
        missed += bool(((found["low"] > 0) | (found["high"] < 0)).any())
        lengths = (found["high"] - found["low"]) / 2
        errors = frame.iloc[:, 1:].sub(frame["a"], axis=0).std() / np.sqrt(seeds)
        factors = (lengths / errors).to_numpy()
        assert (factors >= t.ppf(0.975, seeds - 1) - 1e-9).all()
        assert (factors <= t.ppf(1 - 0.025 / 5, seeds - 1) + 1e-9).all()
    assert missed <= 9  # of 60 with a probability of 0.05: more than 9 in one of a thousand cases


def test_equal_rows_equal_differences_and_single_seeds_decide_nothing():
    frame = pd.DataFrame({"a": [0.5, 0.6], "same": [0.5, 0.6], "shifted": [0.75, 0.85]})
    found = paired_tests(
        frame,
        pairs(frame.rename(columns={"same": "b", "shifted": "c"})) and [("same", "a"), ("shifted", "a")],
        larger=True,
        level=0.95,
    )
    assert found.loc["same", ["difference", "low", "high", "p"]].tolist() == [0, 0, 0, 1]
    assert found.loc["shifted", "p"] == 0.5  # of the signs: the t-test would say 0 from two seeds
    assert found[["low", "high"]].loc["shifted"].isna().all()
    single = paired_tests(frame.iloc[:1], [("shifted", "a")], larger=True, level=0.95)
    assert single.loc["shifted", "difference"] == pytest.approx(0.25)
    assert single[["low", "high", "p", "p_corrected"]].isna().all(axis=None)
    assert set(found["verdict"]) | set(single["verdict"]) == {"undecided"}


def test_rows_with_different_seeds_are_tested_on_those_that_both_have():
    frame = scores(6, [0, 1.0, 0])
    frame.loc[0, "b"] = np.nan
    found = paired_tests(frame, pairs(frame), larger=True, level=0.95)
    assert found["seeds"].tolist() == [5, 6]
    assert found.attrs["intervals"] == BONFERRONI
