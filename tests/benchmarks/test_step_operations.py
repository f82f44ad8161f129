"""The table of launches in docs/gpu.md is what the pretended accelerator counts, and does not grow."""

import pytest

from benchmarks import step_operations
from benchmarks.step_operations import Case, cases, changed
from tests.conftest import STEADY

TEXT = step_operations.PAGE.read_text()
QUICK = [Case("LoRA", "bf16", 1)]
"""One client with casts; a row of a group takes ten seconds."""


def test_the_table_has_every_case():
    names = tuple(f"| {method} | " for method in step_operations.METHODS)
    found = [line for line in TEXT.splitlines() if line.startswith(names)]
    starts = [f"| {case.method} | {case.precision} | {case.group} |" for case in cases()]
    assert [line.startswith(start) for line, start in zip(found, starts, strict=True)] == [True] * len(starts)


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=STEADY) for case in cases()], ids=str
)
def test_a_row_is_what_is_counted(case):
    """Run `python -m benchmarks.step_operations` where this fails, and say why a step asks for more."""
    assert case.row() in TEXT.splitlines()


def test_the_launches_of_random_changes_are_what_is_counted():
    assert f"`flip` {changed('flip')}, `crop` {changed('crop')}" in TEXT
