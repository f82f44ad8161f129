"""Cost of a visit by hand, and of models of other sizes."""

import pytest

from rayfed.federation.cohort import Cost, Load
from rayfed.types import Broadcast

LOADS = {2: Load(step=10, row=3, trained=7), 6: Load(step=10, row=11, trained=15)}
COST = Cost(LOADS, 6)


def sent(blocks=None):
    return Broadcast(round=0, params={}, blocks=blocks)


def test_steps_and_rows_by_hand():
    """5 examples in batches of 2: 3 steps in each of 2 passes, and 10 rows."""
    assert COST.of_visit(sent(), 6, 10) == (6 * 10 + 10 * 11, 15)
    assert COST.of_visit(sent((1, 4)), 6, 10) == (6 * 10 + 10 * 3, 7)
    assert COST.of_visit(sent(), 0, 0) == (0, 15)


@pytest.mark.parametrize(("blocks", "row"), [((0,), 3), ((0, 1, 2), 5), ((0, 1, 2, 3, 4), 9)])
def test_sizes_between_those_that_were_counted(blocks, row):
    assert COST.load(blocks).row == row
