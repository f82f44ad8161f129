"""What can be a class, and in which order classes are."""

import datetime
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfed.data.listing import classes_of, in_order, is_missing, named_in_one_way
from rayfed.errors import DataError


def row(number):
    return f"row {number + 1}"


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ([2, 0, 1], ["0", "1", "2"]),
        (["b", "a"], ["a", "b"]),
        (["10", "9", "1"], ["1", "9", "10"]),
        (["2.0", "0.0"], ["0", "2"]),
        ([1.0, 0.0], ["0", "1"]),
        ([Decimal(3), 1], ["1", "3"]),
        ([np.int64(1), np.float32(0)], ["0", "1"]),
        ([True, False], ["False", "True"]),
        (["nan", "NA", "null", "None"], ["NA", "None", "nan", "null"]),
        ([" pos", " neg"], [" neg", " pos"]),
        (["1.5L", "2L"], ["1.5L", "2L"]),
        ([1, "many"], ["1", "many"]),
    ],
)
def test_texts_and_whole_numbers_are_classes(values, names):
    labels, found = classes_of(values, row)
    assert found == names
    assert labels.dtype == np.int64
    assert len({found[label] for label in labels}) == len(set(values))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([0, float("nan")], "row 2 has no label (nan)"),
        (["a", None], "row 2 has no label (None)"),
        ([0, pd.NA], "row 2 has no label (<NA>)"),
        (["a", " "], "row 2 has no label (' ')"),
        ([0, 1, -1], "row 3 has the label -1"),
        (["a", "-1"], "row 2 has the label '-1'"),
        (["0", "1", "-1.0"], "row 3 has the label '-1.0'"),
        ([0, 0.25], "row 2 has the label 0.25"),
        (["0", "1", "0.25"], "row 3 has the label '0.25'"),
        (["0", "nan"], "row 2 has the label 'nan'"),
        ([[0, 1], [1, 1]], "row 1 has the label [0, 1]"),
        ([0, {"a": 1}], "row 2 has the label {'a': 1}"),
        ([0, np.zeros(2)], "row 2 has the label"),
        ([datetime.date(2024, 1, 1)], "row 1 has the label datetime.date"),
        ([float("inf"), 1], "row 1 has the label inf"),
        (["pos", "neg", "pos "], "row 3 has the label 'pos ', and row 1 has 'pos'"),
        ([1, "1"], "row 2 has the label '1', and row 1 has 1"),
        ([True, 1], "row 2 has the label 1, and row 1 has True"),
    ],
)
def test_what_is_no_class_is_named_with_its_row(values, words):
    with pytest.raises(DataError) as caught:
        classes_of(values, row)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_the_order_of_the_source_is_kept_whatever_the_rows_are(data):
    names = data.draw(st.lists(st.text("abcd", min_size=1), min_size=2, max_size=6, unique=True))
    values = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=20))
    labels, found = classes_of(values, row, names)
    assert found == names
    assert [names[label] for label in labels] == values
    shuffled = data.draw(st.permutations(values))
    assert classes_of(shuffled, row)[1] == classes_of(values, row)[1] == sorted(set(values), key=in_order)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1), st.sampled_from([int, float, str, np.int32, Decimal]))
def test_numbers_are_ordered_by_value_in_every_form(numbers, form):
    labels, names = classes_of([form(number) for number in numbers], row)
    assert [int(names[label]) for label in labels] == numbers
    assert [int(name) for name in names] == sorted(set(numbers))


@pytest.mark.parametrize(
    "value", [None, float("nan"), np.float32("nan"), pd.NA, pd.NaT, np.ma.masked, "", " "]
)
def test_missing_values_in_every_form(value):
    assert is_missing(value)


@pytest.mark.parametrize("value", [0, False, "a", "nan", b"", np.zeros(2), [], {}, np.int8(0), Decimal(0)])
def test_what_is_there_is_not_missing(value):
    assert not is_missing(value)


def test_two_clients_of_one_name_are_refused():
    assert named_in_one_way([1, 2, 1], "client", "who") == ["1", "2", "1"]
    with pytest.raises(DataError, match="1 and '1' are both there in column 'who'"):
        named_in_one_way([1, 2, "1"], "client", "who")
    with pytest.raises(DataError, match=r"holds \[1\]; a client is a text or a number"):
        named_in_one_way([[1]], "client", "who")


def test_equal_numbers_in_text_are_in_one_order():
    assert sorted({"1", "01", "10", "2", "x", "001"}, key=in_order) == ["001", "01", "1", "2", "10", "x"]
