"""Arrays of a user: every type that holds numbers is taken, and what cannot be is named with its example."""

import warnings
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra import numpy as arrays
from PIL import Image

from rayfed.data.user_data import own_data
from rayfed.errors import DataError

X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
Y = np.arange(6) % 3
OBJECTS = pd.Series(list(X)).to_numpy()
MASK = np.arange(24).reshape(6, 4) == 9  # in example 2


def inputs(value):
    return own_data({"a": (value, Y)}).pieces[0].inputs


@pytest.mark.parametrize(
    "value",
    [
        X.astype(np.float64),
        X.astype(">f8"),
        X.astype(np.longdouble),
        torch.tensor(X),
        torch.tensor(X, requires_grad=True),
        torch.tensor(X).to_sparse(),
        [torch.tensor(row) for row in X],
        X.tolist(),
        OBJECTS,
        pd.DataFrame(X),
        [[Decimal(float(value)) for value in row] for row in X],
        X.astype(object),
        np.ma.masked_array(X),
        [np.ma.masked_array(row) for row in X],
    ],
)
def test_every_form_of_numbers_is_the_same_array(value):
    found = inputs(value)
    assert found.dtype == np.float32
    assert np.array_equal(found, X)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_short_floats_of_torch_become_float32(kind):
    tensor = torch.tensor(X).to(kind)
    assert np.array_equal(inputs(tensor), tensor.float().numpy())


@pytest.mark.parametrize("kind", [">i2", ">i4", "u2", "u4", "u8", "?", "i1"])
def test_whole_numbers_keep_their_type_and_have_the_byte_order_of_this_machine(kind):
    value = np.abs(X * 9).astype(kind)
    found = inputs(value)
    assert found.dtype.isnative
    assert found.dtype == value.dtype.newbyteorder("=")
    assert np.array_equal(found, value)


def masked(form):
    array = np.ma.masked_array(X, mask=MASK)
    if form == "in a list":
        return list(array)
    if form == "in lists":
        return [
            [np.ma.masked if own else float(v) for v, own in zip(*pair, strict=True)]
            for pair in zip(X, MASK, strict=True)
        ]
    if form == "of objects":
        return np.ma.masked_array(X.astype(object), mask=MASK)
    if form == "in an object array":
        return pd.Series(list(array)).to_numpy()
    if form == "of torch":
        return torch.masked.masked_tensor(torch.tensor(X), torch.tensor(~MASK))
    return array


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "form", ["of NumPy", "in a list", "in lists", "of objects", "in an object array", "of torch"]
)
def test_masked_values_are_refused_with_their_example(form):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = masked(form)
    with pytest.raises(DataError, match=r"data\['a'\]\[0\]: example 2 has masked values"):
        inputs(value)
    with pytest.raises(DataError, match=r"data\['a'\]\['test'\]\[0\]: example 2 has masked values"):
        own_data({"a": {"train": (X, Y), "test": (value, Y)}})


def test_masked_targets_and_items_of_a_dataset_are_refused():
    with pytest.raises(DataError, match=r"data\['a'\]\[1\]: example 1 has masked values.*\(2\)"):
        own_data({"a": (X, np.ma.masked_array(Y, mask=Y == 1))})

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return np.ma.masked_array(X[index], mask=MASK[index]), 1

    with pytest.raises(DataError, match=r"data\['a'\] \(Rows\): example 2 has masked values"):
        own_data({"a": Rows()})


@settings(max_examples=30, deadline=None)
@given(arrays.arrays(np.bool_, (6, 4)))
def test_a_mask_is_taken_exactly_where_it_masks_nothing(mask):
    value = np.ma.masked_array(X, mask=mask)
    if mask.any():
        first = int(np.flatnonzero(mask.any(axis=1))[0])
        with pytest.raises(DataError, match=f"example {first} has masked values"):
            inputs(value)
    else:
        assert np.array_equal(inputs(value), X)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (["some text"] * 6, "the inputs are texts, such as 'some text'"),
        (X.astype(str), "the inputs are numbers as text, such as"),
        (X[:, :0], "hold no number|holds no number"),
        (X.astype(complex), "complex numbers"),
        (np.zeros(6, "M8[D]"), "dates cannot be stored"),
        (np.zeros(6, [("a", "f4")]), "named fields"),
        ([[1, 2], [3]] * 3, "different shapes"),
        ([1.0, None, 2.0] * 2, "example 1 has no value"),
        ([1.0, "a", 2.0] * 2, "example 1 is 'a', a text, and example 0 1.0, a number"),
        (pd.array([1, None] * 3, dtype="Int64"), "example 1 has no value"),
        ([{"a": 1}] * 6, "of type dict"),
        (np.full((6, 2), 1e300), "hold NaN or infinity"),
        (pd.DataFrame({"p": list("abcdef"), "q": 1.0}), "column 'p' holds text"),
    ],
)
def test_what_cannot_be_an_input_is_one_line(value, words):
    with pytest.raises(DataError, match=words) as caught:
        inputs(value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("data['a']")


@pytest.mark.parametrize(
    "labels",
    [
        np.array(["cat", "dog", "cow"] * 2, dtype=object),
        ["cat", "dog", "cow"] * 2,
        [b"cat", b"dog", b"cow"] * 2,
        np.array([b"cat", b"dog", b"cow"] * 2),
        np.array(["cat", "dog", "cow"] * 2, dtype=np.dtypes.StringDType()),
        pd.Series(["cat", "dog", "cow"] * 2),
    ],
)
def test_texts_in_every_form_are_classes(labels):
    listing = own_data({"a": (X, labels)}).scan()
    assert listing.classes == ("cat", "cow", "dog")
    assert listing.labels.tolist() == [0, 2, 1] * 2


@pytest.mark.parametrize("missing", [None, float("nan"), pd.NA, "", " "])
@pytest.mark.parametrize("place", [0, 3, 5])
def test_a_missing_label_is_refused_whatever_row_it_is_in(missing, place):
    labels = ["a", "b", "c"] * 2
    labels[place] = missing
    for form in (labels, np.array(labels, dtype=object), pd.Series(labels, dtype=object)):
        with pytest.raises(DataError, match=rf"data\['a'\]\[1\]: example {place} has no value"):
            own_data({"a": (X, form)})


def test_images_with_a_palette_in_a_dataset_have_colours():
    image = Image.new("RGB", (4, 4), (250, 10, 20)).convert("P")
    found = own_data({"a": ([image] * 6, Y)}).pieces[0].inputs
    assert found.shape == (6, 4, 4, 3)
    assert abs(int(found[0, 0, 0, 0]) - 250) < 30


@pytest.mark.parametrize(("small", "large"), [("int8", "int64"), ("uint8", "int16"), ("uint16", "int32")])
def test_whole_numbers_of_clients_with_several_types_keep_their_values(small, large):
    low, high = np.full((6, 2), 7, small), np.full((6, 2), 1000, large)
    own = own_data({"a": (low, Y), "b": (high, Y)})
    stored = np.concatenate([part["input"] for part in own.rows(4)])
    np.testing.assert_array_equal(stored, np.concatenate([low, high]))
    masks = own_data(
        {
            "a": (np.ones((2, 3, 2, 2)), np.ones((2, 2, 2), small)),
            "b": (np.ones((2, 3, 2, 2)), high[:2, :, None] + np.zeros((1, 1, 2), large)),
        }
    )
    stored = np.concatenate([part["target"] for part in masks.rows(4)])
    assert stored.max() == 1000


def test_whole_numbers_that_no_type_holds_are_refused():
    with pytest.raises(DataError, match="give all clients int64"):
        own_data({"a": (np.full((6, 2), 2**63 + 1, np.uint64), Y), "b": (np.full((6, 2), -1), Y)})


@pytest.mark.parametrize("labels", [[2**63 + 1, 0, 1, 0, 1, 0], [10**9, 0, 1, 0, 1, 0]])
def test_a_number_that_is_no_output_is_no_class(labels):
    with pytest.raises(
        DataError, match=r"the target of example 0 is \d+, but a class is the number of an output"
    ):
        own_data({"a": (X, np.array(labels, dtype=np.uint64))})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([Decimal("sNaN")] * 6, "example 0 has no value"),
        (["a\0", "b", "c"] * 2, "example 0 ends with the character NUL"),
        (["\u00e9", "e\u0301", "c"] * 2, "write a class in one way everywhere"),
    ],
)
def test_labels_that_would_change_or_look_alike_are_refused(value, words):
    with pytest.raises(DataError, match=words):
        own_data({"a": (X, value)}).scan()


@pytest.mark.parametrize(
    "value",
    [
        pa.array(X.tolist()),
        pa.chunked_array([X[:2].tolist(), X[2:].tolist()]),
        torch.nested.nested_tensor(list(torch.tensor(X)), layout=torch.jagged),
    ],
)
def test_arrays_without_a_shape_are_inputs(value):
    np.testing.assert_array_equal(inputs(value), X)


def test_sparse_matrices_of_scipy_are_inputs():
    sparse = pytest.importorskip("scipy.sparse")
    for kind in (sparse.csr_matrix, sparse.coo_array):
        np.testing.assert_array_equal(inputs(kind(X)), X)


def test_labels_of_arrow_and_ranges_are_labels():
    labels = pa.array(["b", "a", "c"] * 2)
    assert own_data({"a": (X, labels)}).scan().labels.tolist() == [1, 0, 2] * 2
    ordered = labels.dictionary_encode()
    assert own_data({"a": (X, ordered)}).scan().classes == ("b", "a", "c")
    assert own_data({"a": (X, range(6))}).scan().labels.tolist() == list(range(6))
    with pytest.raises(DataError, match="example 1 has no value"):
        own_data({"a": (X, pa.array([0, None, 1] * 2))})
