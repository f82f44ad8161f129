"""kill -9 of each part of a run: one line, an exit code, nothing left, the same bytes afterwards."""

import pytest

from benchmarks.kill_cases import cases
from benchmarks.kill_table import Bench
from tests.conftest import STEADY

CERTAIN = ("gcs_server, in a round, quiet",)
"""Cases that CI runs; the rest is for `make test-slow` and benchmarks/results/kill_table.md."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("kills"))


@pytest.mark.ray
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=STEADY if case in CERTAIN else pytest.mark.slow) for case in cases()],
)
def test_every_kill_ends_with_a_line_and_can_be_resumed(case, bench):
    what, *rest = case.split(", ")
    ending = bench.kill(what, *rest) if len(rest) == 2 else bench.place(what)
    assert ending.good, ending
