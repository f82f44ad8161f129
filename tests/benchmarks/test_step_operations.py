"""The table of launches in docs/gpu.md is what the pretended accelerator counts, and does not grow."""

import pytest

from benchmarks import step_operations
from benchmarks.step_operations import Case, cases, changed
from tests.conftest import STEADY

TEXT = step_operations.PAGE.read_text()
LARGE = 32
STEADY_LARGE = [Case("LoRA", "bf16", LARGE)]
"""Of the largest groups, which take up to a minute each, CI runs one."""


def marked(case):
    return pytest.param(
        case, marks=STEADY if case.group < LARGE or case in STEADY_LARGE else pytest.mark.slow
    )


def launches(method, precision, group):
    """Launches of a step, as the table has them."""
    start = f"| {method} | {precision} | {group} |"
    return int(next(line for line in TEXT.splitlines() if line.startswith(start)).split("|")[4])


def test_the_table_has_every_case():
    names = tuple(f"| {method} | " for method in step_operations.METHODS)
    found = [line for line in TEXT.splitlines() if line.startswith(names)]
    starts = [f"| {case.method} | {case.precision} | {case.group} |" for case in cases()]
    assert [line.startswith(start) for line, start in zip(found, starts, strict=True)] == [True] * len(starts)


def test_launches_of_a_network_do_not_grow_with_the_clients():
    assert launches("LoRA", "bf16", 1) <= 450
    for precision in step_operations.PRECISIONS:
        one, eight, large = (launches("LoRA", precision, group) for group in step_operations.GROUPS)
        assert large == eight  # nothing is computed client by client
        assert large <= 1.1 * one


@pytest.mark.parametrize("method", ["FedRA", "InclusiveFL"])
def test_clients_with_different_blocks_take_about_the_launches_of_one_with_all(method):
    for precision in step_operations.PRECISIONS:
        for group in step_operations.GROUPS[1:]:
            assert launches(method, precision, group) <= 1.1 * launches("LoRA", precision, 1)


@pytest.mark.parametrize("method", ["FedGCR", "FedCLIP"])
def test_the_losses_of_a_method_are_computed_for_all_clients_at_once(method):
    for precision in step_operations.PRECISIONS:
        for group in step_operations.GROUPS[1:]:
            assert launches(method, precision, group) <= 1.3 * launches(method, precision, 1)


@pytest.mark.parametrize("case", map(marked, cases()), ids=str)
def test_a_row_is_what_is_counted(case):
    """Run `python -m benchmarks.step_operations` where this fails, and say why a step asks for more."""
    assert case.row() in TEXT.splitlines()


def test_the_launches_of_random_changes_are_what_is_counted():
    assert f"`flip` {changed('flip')}, `crop` {changed('crop')}" in TEXT
