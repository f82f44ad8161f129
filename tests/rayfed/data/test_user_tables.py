"""Tables: columns of numbers are inputs, no row and no order of classes is lost, wrong columns are named."""

import datetime
import io
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rayfed.data.user_data import own_data
from rayfed.errors import DataError

RNG = np.random.default_rng(0)
BASE = pd.DataFrame(RNG.normal(size=(12, 4)).astype(np.float32), columns=list("abcd")).assign(
    label=np.arange(12) % 3, client=list("ppppqqqqrrrr")
)
NAMES = ["World", "Sports", "Business", "Sci/Tech"]


def refused(frame, words, **options):
    with pytest.raises(DataError) as caught:
        own_data(frame, **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def rows(frame, **options):
    pieces = own_data(frame, **options).pieces
    return np.concatenate([piece.inputs for piece in pieces])


def test_nothing_of_a_table_is_lost_and_it_is_not_changed():
    before = BASE.copy(deep=True)
    found = own_data(BASE)
    assert np.array_equal(rows(BASE), BASE[list("abcd")].to_numpy())
    assert np.array_equal(found.scan().labels, BASE["label"])
    assert found.scan().owners == BASE["client"].tolist()
    assert found.said == "columns of the table: inputs a, b, c, d; target label"
    pd.testing.assert_frame_equal(BASE, before)


@pytest.mark.parametrize(
    "change",
    [
        {"a": pd.array(range(12), dtype="Int64")},
        {"a": pd.array([True, False] * 6, dtype="boolean")},
        {"a": [True, False] * 6},
        {"a": pd.array(np.arange(12) / 2, dtype="Float64")},
        {"a": [Decimal(n) / 4 for n in range(12)]},
        {"a": pd.Series([1, 2.5, True] * 4, dtype=object)},
        {"a": pd.arrays.SparseArray([0.0, 1.0] * 6)},
        {"a": pd.array(range(12), dtype=pd.ArrowDtype(pa.int32()))},
        {"a": 1, "b": 2, "c": 3, "d": 4},
    ],
)
def test_columns_of_every_kind_of_number_are_inputs(change):
    frame = BASE.assign(**change)
    found = rows(frame)
    assert found.dtype == np.float32
    assert np.array_equal(found, np.stack([frame[n].astype(float) for n in "abcd"], 1).astype(np.float32))


def test_a_column_is_the_input_by_its_name_only_where_it_holds_arrays_or_images():
    assert rows(BASE.rename(columns={"a": "x", "b": "image", "c": "path"})).shape == (12, 4)
    arrays = pd.DataFrame({"x": list(BASE[list("ab")].to_numpy()), "age": 1, "label": BASE["label"]})
    assert rows(arrays).shape == (12, 2)
    assert own_data(arrays).said.endswith("inputs x; target label; not used: age")
    refused(arrays.rename(columns={"x": "what"}), "column 'what' holds arrays")
    assert rows(arrays.rename(columns={"x": "what"}), columns={"input": "what"}).shape == (12, 2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            "Rome",
            "column 'city' holds text, such as 'Rome'; make it numbers, such as with pandas.get_dummies",
        ),
        (
            "1.5",
            "column 'city' holds numbers as text, such as '1.5'; make them numbers, such as with pandas.to_",
        ),
        (pd.Timestamp("2024-01-01"), "column 'city' holds dates"),
        (datetime.date(2024, 1, 1), "column 'city' holds dates"),
        (pd.Timedelta("1s"), "column 'city' holds dates"),
        (pd.Categorical(["u", "v"] * 6), "column 'city' holds text, such as 'u'"),
        (1j, "column 'city' holds complex numbers"),
        ([1, "b"] * 6, "column 'city' holds numbers and text"),
        ([1.0, np.nan] * 6, "row 2 of the table has no value in column 'city'; fill or leave out 6"),
        (pd.array([1, None] * 6, dtype="Int64"), "row 2 of the table has no value in column 'city'"),
    ],
)
def test_a_column_that_is_no_number_is_named_with_what_to_do(values, words):
    refused(BASE.assign(city=values), words)


@pytest.mark.parametrize("part", ["client", "split", "domain"])
@pytest.mark.parametrize("missing", [None, np.nan, pd.NA, pd.NaT, "", " "])
def test_a_row_without_client_split_or_domain_is_refused(part, missing):
    frame = BASE.assign(split="train", domain="D")
    values = frame[part].astype(object)
    values.iloc[7:9] = [missing, missing]
    words = f"row 8 of the table has no {part} in column {part!r}; fill or leave out 2 such rows"
    for table in (frame.assign(**{part: values}), frame.assign(**{part: values}).to_dict("list")):
        refused(pd.DataFrame(table), words)
    categories = frame.assign(**{part: values.where(values.map(lambda v: isinstance(v, str)), None)})
    if missing is None:
        refused(categories.astype({part: "category"}), words)
        refused(pa.Table.from_pandas(frame.assign(**{part: values}), preserve_index=False), words)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["p", "q", 1, 2, None]), min_size=12, max_size=12))
def test_every_row_is_used_or_the_table_is_refused(clients):
    frame = BASE.assign(client=pd.Series(clients, dtype=object))
    if None in clients:
        refused(frame, f"row {clients.index(None) + 1} of the table has no client")
    else:
        own = own_data(frame).scan()
        assert len(own.labels) == 12
        assert sorted(own.owners) == sorted(map(str, clients))


def test_the_row_of_a_sorted_table_is_named_with_its_index():
    frame = BASE.assign(client=[*"pppp", None, *"qqqrrrr"]).sort_index(ascending=False)
    refused(frame, "row 8 of the table (index 4) has no client")


@pytest.mark.parametrize("ordered", [True, False])
def test_the_order_of_a_categorical_is_that_of_the_outputs(ordered):
    codes = RNG.integers(0, 4, 12)
    column = pd.Categorical.from_codes(codes, categories=NAMES, ordered=ordered)
    tables = [BASE.assign(label=column)]
    tables.append(pa.Table.from_pandas(tables[0]))
    pairs = {c: (own[list("abcd")].to_numpy(), own["label"]) for c, own in tables[0].groupby("client")}
    for value in (*tables, pairs):
        listing = own_data(value).scan()
        assert listing.classes == tuple(NAMES)
        assert listing.labels.tolist() == codes.tolist()


def test_the_order_of_a_dictionary_of_arrow_and_of_a_class_label_is_kept():
    datasets = pytest.importorskip("datasets")
    codes = np.arange(12) % 4
    dictionary = pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(NAMES))
    table = pa.table({"a": BASE["a"], "label": dictionary, "client": BASE["client"]})
    features = datasets.Features({"a": datasets.Value("float32"), "label": datasets.ClassLabel(names=NAMES)})
    labelled = datasets.Dataset.from_dict({"a": BASE["a"], "label": codes}, features=features)
    for value in (table, labelled, labelled.with_format("torch")):
        listing = own_data(value).scan()
        assert listing.classes == tuple(NAMES)
        assert listing.labels.tolist() == codes.tolist()


def test_clients_with_other_orders_of_classes_are_refused_only_where_the_order_matters():
    def pair(names, ordered):
        return BASE[["a"]].to_numpy(), pd.Series(pd.Categorical(list("uvuvuvuvuvuv"), names, ordered=ordered))

    with pytest.raises(DataError, match=r"data\['q'\]: the classes are v, u, those of data\['p'\] u, v"):
        own_data({"p": pair(["u", "v"], True), "q": pair(["v", "u"], True)})
    loose = own_data({"p": pair(["u", "v"], False), "q": pair(["w", "v", "u"], False)}).scan()
    assert loose.classes == ("u", "v", "w")


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["y", "z", np.nan] * 4, "row 3 of the table has no label in column 'label'"),
        ([0.0, 1.0, np.nan] * 4, "row 3 of the table has no label in column 'label'"),
        (pd.array([0, 1, None] * 4, dtype="Int64"), "row 3 of the table has no label"),
        (
            pd.Categorical(["y", None, "z"] * 4),
            "row 2 of the table has no label in column 'label' (missing, or -1)",
        ),
        ([0, 1, -1] * 4, "row 3 of the table has the label -1 in 'label'"),
        (["pos", "pos ", "neg"] * 4, "the label 'pos '"),
        (["0.5", "1", "0"] * 4, "the label '0.5'"),
        ([{"a": 1}] * 12, "of type dict"),
        (pd.Timestamp("2024-01-01"), "column 'label' holds dates"),
    ],
)
def test_labels_that_are_no_classes_are_refused_whatever_row_they_are_in(labels, words):
    refused(BASE.assign(label=labels), words)


@pytest.mark.parametrize("bad", [None, -1])
def test_an_example_of_datasets_without_a_label_is_named(bad):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"a": datasets.Value("float32"), "label": datasets.ClassLabel(names=["n", "p"])}
    )
    found = datasets.Dataset.from_dict({"a": [0.0] * 6, "label": [0, 1, bad] * 2}, features=features)
    refused(found, "row 3 of the table has no label in column 'label' (missing, or -1); fill or leave out 2")


def test_a_missing_image_is_named():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["n", "p"])})
    pixels = np.zeros((4, 4, 3), np.uint8)
    found = datasets.Dataset.from_dict({"image": [pixels, None], "label": [0, 1]}, features=features)
    refused(found, "row 2 of the table has no input in column 'image'")
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    refused(pd.DataFrame({"img": [None, out.getvalue()], "label": [0, 1]}), "row 1 of the table has no input")


def test_names_that_are_there_twice_or_in_two_forms_are_refused():
    for name in ("label", "client", "a"):
        refused(pd.concat([BASE, BASE[[name]]], axis=1), f"the table has two columns {name!r}")
    refused(BASE.assign(client=[1, "1", 2] * 4), "1 and '1' are both there in column 'client'")
    for value in ({1: (BASE[["a"]], BASE["label"]), "1": (BASE[["a"]], BASE["label"])},):
        refused(value, "data['1']: the client 1 has the same name")
    for client in (None, float("nan"), ""):
        refused({client: (BASE[["a"]], BASE["label"])}, "names no client")
    refused({"p": {"train": (BASE[["a"]], BASE["label"]), "domain": None}}, "names no domain")


def test_a_client_that_is_the_index_is_not_lost():
    refused(
        BASE.set_index("client"), "'client' is the index of the table, no column; give frame.reset_index()"
    )
    assert own_data(BASE.set_index("a").reset_index()).has_clients
    refused(BASE.iloc[:0], "the table has no rows")


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"client": ["a", "b"]}, "columns.client: ['a', 'b'] are several columns"),
        ({"client": None}, "columns.client: None does not exist"),
        ({"target": 3}, "columns.target: 3 does not exist"),
        ({"input": "label"}, "columns.input: 'label' is the target"),
        ({"input": ["a", "label"]}, "columns.input: 'label' is the target"),
        (["label"], "columns: ['label'] is no dict"),
    ],
)
def test_columns_that_cannot_be_are_one_line(columns, words):
    refused(BASE, words, columns=columns)


def test_columns_of_what_is_no_table_are_refused():
    refused({"p": (BASE[["a"]], BASE["label"])}, "columns: {'target': 'a'} name", columns={"target": "a"})


def test_columns_with_numbers_as_names_are_named_by_numbers():
    frame = pd.DataFrame(np.c_[BASE[list("abcd")], BASE["label"]])
    own = own_data(frame, {"target": 4}, task="classification").of_task("classification")
    assert own.pieces[0].inputs.shape == (12, 4)
    assert own.scan().labels.tolist() == BASE["label"].tolist()


def test_two_columns_that_could_be_targets_or_clients_are_asked_for():
    refused(BASE.assign(target=1), "columns.target: the table has the columns target and label")
    refused(BASE.assign(user=1), "columns.client: the table has the columns client and user")
    assert own_data(BASE.assign(y=0.5)).pieces[0].inputs.shape[1] == 5  # a coordinate


@pytest.mark.parametrize("column", ["client", "domain"])
@pytest.mark.parametrize(
    "pair", [("ann", "ann "), (b"ann", "ann"), ("\u00e9", "e\u0301"), (1, True), (1, "1")]
)
def test_names_that_look_alike_are_refused(column, pair):
    frame = BASE.assign(**{column: pd.Series(list(pair) * 6, dtype=object)})
    refused(frame, f"in column {column!r}, and have one name")


class Thing:
    """A name without an order."""


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([("a", 1), ("a", 2)], "column 'client' holds ('a', 1); a client is a text or a number"),
        ([frozenset("a"), frozenset("b")], "column 'client' holds frozenset({'a'}); a client is"),
        ([Thing(), Thing()], "the values of 'client' cannot be sorted"),
    ],
)
def test_names_that_are_no_texts_and_no_numbers_are_refused(names, words):
    refused(BASE.assign(client=pd.Series(names * 6, dtype=object)), words)


@pytest.mark.parametrize("values", [np.arange(12) + 1e9, np.arange(12) + 2**60, -1e9 - np.arange(12)])
def test_numbers_that_become_equal_as_float32_are_said(values, caplog):
    own_data(BASE.assign(a=values, b=values - values[0]))
    [said] = caplog.messages
    assert "column 'a' has 12 different values in its first 12 rows, and " in said


def test_names_in_bytes_are_text():
    own = own_data(BASE.assign(client=[b"p"] * 6 + [b"q"] * 6, label=[b"u", b"v"] * 6)).scan()
    assert sorted(set(own.owners or ())) == ["p", "q"]
    assert own.classes == ("u", "v")


def test_lists_of_classes_are_no_zeros_and_ones():
    datasets = pytest.importorskip("datasets")
    several = datasets.Sequence(datasets.ClassLabel(names=["u", "v"]))
    features = datasets.Features({"a": datasets.Value("float32"), "label": several})
    table = datasets.Dataset.from_dict({"a": [0.5, 1.5], "label": [[0, 1], [1, 0]]}, features=features)
    refused(table, "column 'label' holds lists of classes")


@pytest.mark.parametrize("make", [lambda frame: frame, pa.Table.from_pandas])
def test_a_dict_of_tables_says_what_to_give(make):
    refused({"ann": make(BASE), "bob": make(BASE)}, "data['ann']: a table in a dict; give one table")
