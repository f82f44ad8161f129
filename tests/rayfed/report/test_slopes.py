"""Gaps over weights: weights, lines and gaps that are linear in the weights, by hand."""

import pytest

from rayfed.report.slopes import changed_weights, line, slope_rows


def test_the_others_keep_their_proportions():
    assert changed_weights([0.5, 0.3, 0.2], 1, -0.2) == pytest.approx([0.9 / 0.7 * 0.5, 0.1, 0.9 / 0.7 * 0.2])
    assert changed_weights([0.1, 0.9], 0, -0.2) is None
    assert changed_weights([0.1, 0.9], 1, 0.2) is None
    assert changed_weights([1.0], 0, 0.0) is None


def test_the_least_squares_line_by_hand():
    """Points (-1, 3), (0, 0), (1, 0): slope -3/2, rho = -3 / sqrt(2 * 6)."""
    assert line([-1, 0, 1], [3, 0, 0]) == pytest.approx((-1.5, -3 / 12**0.5))
    assert line([-1, 0, 1], [2, 2, 2]) == (0.0, 0.0)


def test_gaps_that_are_linear_in_the_weights():
    """G_i = c_i - a_i / K_i, as FFT-GP's Eq. 8 assumes: slope -1 / K_i and rho -1."""
    k = [0.5, 2.0]
    asked = []

    def gap(client, weights):
        asked.append(weights)
        return [3.0, 1.0][client] - weights[client] / k[client]

    rows = slope_rows(["a", "b"], [0.1, 0.9], [-0.2, -0.1, 0.0, 0.1, 0.2], gap)
    assert all(sum(weights) == pytest.approx(1) for weights in asked)
    changes = {name: [row["change"] for row in rows if row["client"] == name] for name in "ab"}
    assert changes == {"a": [-0.1, 0.0, 0.1, 0.2], "b": [-0.2, -0.1, 0.0, 0.1]}
    for row in rows:
        own = k["ab".index(row["client"])]
        assert (row["slope"], row["rho"]) == pytest.approx((-1 / own, -1))
        assert row["gap_change"] == pytest.approx(-row["change"] / own)
