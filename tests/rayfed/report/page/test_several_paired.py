"""Statistics of paired differences, against values worked out by hand."""

import pytest

from rayfed.report.page.several import statistics
from tests.rounding import printed


def test_differences_of_one_two_and_three_points():
    """Mean 0.02, deviation 0.01, t = 0.02 / (0.01 / sqrt 3) = 3.464 with 2 degrees of freedom: p = 0.0742."""
    assert statistics([0.01, 0.02, 0.03]) == [
        3,
        pytest.approx(0.02),
        pytest.approx(0.01),
        3,
        0,
        pytest.approx(0.0742, abs=printed(4)),
    ]


def test_one_difference_and_equal_ones_have_no_p():
    assert statistics([-0.5]) == [1, -0.5, None, 0, 1, None]
    assert statistics([0.0, 0.0]) == [2, 0, 0, 0, 0, None]
