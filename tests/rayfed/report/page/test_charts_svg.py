"""Scales, ticks and paths of pictures."""

import numpy as np
import pytest

from rayfed.report.page import charts


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.3, 0.7), (1, 200), (1e-9, 3e-9), (-5, 12345678), (2, 2)]
)
def test_ticks_are_few_round_numbers_inside(low, high):
    found = charts.ticks(low, high)
    assert 1 <= len(found) <= 7
    assert all(low <= tick <= high for tick in found)


def test_rounds_have_ticks_at_whole_numbers():
    assert charts.whole_ticks(0.5, 1.5) == [1]
    assert all(tick.is_integer() for tick in charts.whole_ticks(1, 15))


def test_a_path_has_a_gap_where_there_is_no_number():
    assert charts.path([(0, 1), (1, 2), (2, float("nan")), (3, 4)]) == "M0.0,1.0L1.0,2.0M3.0,4.0"


def test_thinning_keeps_both_ends():
    found = charts.thinned(1000, 7)
    assert (found[0], found[-1], len(found)) == (0, 999, 7)
    assert charts.thinned(3, 7) == [0, 1, 2]


def test_shades_are_those_of_viridis_and_empty_cells_are_transparent():
    pixels = charts.shaded(np.array([[0.0, 1.0, np.nan]]), 0, 1)
    assert pixels[0, 0].tolist() == [68, 1, 84, 255]
    assert pixels[0, 1].tolist() == pytest.approx([253, 231, 37, 255], abs=1)
    assert pixels[0, 2].tolist() == [0, 0, 0, 0]


def test_words_are_escaped():
    assert "<b>" not in charts.text(0, 0, "<b>")
    assert '"' not in charts.whole([], 'say "x"').split("aria-label=")[1].split(" font")[0].strip('"')
