"""The parts of the cases of a test are all of them, each once, and only of tests with many."""

import pytest

from tests.part import MANY, left_out, part_of


def test_parts_together_have_each_case_of_a_test_with_many_once():
    cases = [(f"t{len(str(i))}", i) for i in range(100)]  # 10 of one test, 90 of another
    run = [set(range(100)) - set(left_out(cases, number, 3)) for number in (1, 2, 3)]
    assert set.union(*run) == set(range(100))
    assert sum(map(len, run)) == 100
    assert all(30 <= len(each) <= 36 for each in run)
    assert [len(each & set(range(10))) for each in run] == [4, 3, 3]


def test_tests_with_few_cases_are_in_every_part():
    cases = [("few", i) for i in range(MANY - 1)]
    assert left_out(cases, 2, 3) == []


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", ""])
def test_what_is_no_part_is_refused(text):
    with pytest.raises(pytest.UsageError, match="is no part such as 2/3"):
        part_of(text)
