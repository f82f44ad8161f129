"""The table of tests of a study, and its margin."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_rel

from rayfed.errors import ConfigError
from rayfed.experiment.study.paired_tests import checked_margin, paired_tests


def scores(seeds, effects, seed=0):
    """Scores of rows that share what is hard about a seed; `effects` are their true differences."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(0, 1, (seeds, 1))
    values = shared + np.array(effects) + rng.normal(0, 0.1, (seeds, len(effects)))
    return pd.DataFrame(values, columns=list("abcdefgh")[: len(effects)], index=range(seeds))


def pairs(frame):
    return [(name, "a") for name in frame.columns[1:]]


def test_a_single_difference_has_the_ordinary_paired_t_test():
    frame = scores(6, [0, 0.3])
    found = paired_tests(frame, pairs(frame), larger=True, level=0.95)
    test = ttest_rel(frame["b"], frame["a"])
    interval = test.confidence_interval(0.95)
    assert found.loc["b", ["p", "p_corrected"]].tolist() == pytest.approx([test.pvalue] * 2)
    assert found.loc["b", ["low", "high"]].tolist() == pytest.approx([interval.low, interval.high])
    assert found["verdict"].tolist() == ["better"]
    worse = paired_tests(frame, pairs(frame), larger=False, level=0.95)
    assert worse["verdict"].tolist() == ["worse"]


def test_rows_with_different_seeds_are_tested_on_those_that_both_have():
    frame = scores(9, [0, 1.0, 0])
    frame.loc[0, "b"] = np.nan
    found = paired_tests(frame, pairs(frame), larger=True, level=0.95)
    assert found["seeds"].tolist() == [8, 9]
    assert found["verdict"].tolist() == ["better", "open"]
    assert found.attrs["family"].how == "least favourable of simulated families"


def test_pairs_of_the_same_bytes_are_not_tested():
    frame = scores(3, [0, 0.0, 2.0])
    frame["b"] = frame["a"]
    found = paired_tests(frame, pairs(frame), True, 0.95, same=[("b", "a")])
    assert found["verdict"].tolist() == ["same", "better"]
    assert np.isnan(found.loc["b", "p_corrected"])
    alone = paired_tests(frame, [("c", "a")], True, 0.95)
    assert found.loc["c", "high"] == alone.loc["c", "high"]  # it does not count as a test


@pytest.mark.parametrize("margin", [0, -0.1, float("nan"), float("inf"), "1"])
def test_a_margin_that_is_no_positive_number_is_refused(margin):
    with pytest.raises(ConfigError, match=r"margin: .* is no positive number, such as 0.01"):
        checked_margin(margin)
    assert checked_margin(0.5) == 0.5
