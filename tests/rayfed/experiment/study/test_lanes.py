"""Lanes side by side: a lane for each cell, and what ends all of them."""

import threading

import pytest

from rayfed.errors import ClusterError
from rayfed.experiment.study.lanes import Beside
from rayfed.experiment.study.run_cell import Outcome


class Waits:
    """A lane that runs a cell until all lanes have one."""

    def __init__(self, barrier):
        self.barrier, self.ended = barrier, False

    def run(self, cell):
        self.barrier.wait(10)
        return Outcome(sha256=cell)

    def end(self):
        self.ended = True


def test_cells_run_at_once_and_a_lost_cluster_ends_them():
    lanes = [Waits(threading.Barrier(2))] * 2
    lost = []

    def look():
        if lost:
            raise ClusterError(lost[0])

    beside = Beside(lanes, look)
    found = {}
    for cell in ("a", "b"):
        beside.start(cell)
    while len(found) < 2:
        found |= dict(beside.ended())
    assert {cell: outcome.sha256 for cell, outcome in found.items()} == {"a": "a", "b": "b"}
    lost.append("Ray's raylet ended")
    with pytest.raises(ClusterError, match="raylet ended"):
        list(beside.ended())
    beside.end()
    assert lanes[0].ended
