"""Examples of a user: every form gives the same listing, and what does not fit is named."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rayfed.data.preparation import prepare
from rayfed.data.shards import open_dataset
from rayfed.data.user_data import is_own, own_data
from rayfed.errors import DataError

RNG = np.random.default_rng(0)
ARRAYS = {
    f"c{i}": (RNG.normal(0, 1, (6 + i, 2, 3)).astype(np.float32), np.arange(6 + i) % 3) for i in range(3)
}


def stored(value, tmp_path, columns=None):
    return open_dataset(prepare(own_data(value, columns), 8, tmp_path))


def rows_of_a_table():
    flat = [
        (c, x.ravel().tolist(), f"k{y}")
        for c, (inputs, labels) in ARRAYS.items()
        for x, y in zip(inputs, labels, strict=True)
    ]
    return pd.DataFrame(flat, columns=["client", "input", "target"])


def test_the_file_holds_what_was_handed_over(tmp_path):
    found = stored(ARRAYS, tmp_path)
    assert np.array_equal(found.images, np.concatenate([x for x, _ in ARRAYS.values()]))
    assert np.array_equal(found.labels, np.concatenate([y for _, y in ARRAYS.values()]))
    assert found.owners == [c for c, (x, _) in ARRAYS.items() for _ in x]
    assert found.classes == ("0", "1", "2")
    assert found.own


def test_torch_and_numpy_and_datasets_give_the_same_bytes(tmp_path):
    tensors = {c: (torch.tensor(x), torch.tensor(y)) for c, (x, y) in ARRAYS.items()}
    sets = {c: torch.utils.data.TensorDataset(*pair) for c, pair in tensors.items()}
    doubled = {c: (x.astype(np.float64), y) for c, (x, y) in ARRAYS.items()}
    digests = {stored(value, tmp_path).digest for value in (ARRAYS, tensors, sets, doubled)}
    assert len(digests) == 1


def test_tables_of_pandas_and_arrow_give_the_same_bytes(tmp_path):
    frame = rows_of_a_table()
    found = {stored(value, tmp_path).digest for value in (frame, pa.Table.from_pandas(frame))}
    assert len(found) == 1
    table = stored(frame, tmp_path)
    assert table.classes == ("k0", "k1", "k2")
    assert table.images.shape == (21, 6)


def test_several_columns_are_one_input(tmp_path):
    frame = pd.DataFrame(
        {
            "who": list("aabb"),
            "age": [1, 2, 3, 4],
            "height": [1.5, 1.6, 1.7, 1.8],
            "risk": [0.1, 0.2, 0.3, 0.4],
        }
    )
    found = stored(frame, tmp_path, {"client": "who", "target": "risk"})
    assert found.images.tolist() == np.float32([[1, 1.5], [2, 1.6], [3, 1.7], [4, 1.8]]).tolist()
    assert found.task == "regression"
    assert found.masks.tolist() == np.float32([0.1, 0.2, 0.3, 0.4]).tolist()


def test_paths_and_bytes_of_images_are_decoded(tmp_path):
    pixels = RNG.integers(0, 255, (8, 8, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "one.png")
    content = (tmp_path / "one.png").read_bytes()
    for value in (str(tmp_path / "one.png"), content):
        frame = pd.DataFrame({"client": ["a", "a"], "image": [value, value], "label": [0, 1]})
        assert np.array_equal(stored(frame, tmp_path).images[1], pixels)


@pytest.mark.parametrize(
    ("targets", "task"),
    [
        (np.array([0, 1, 2]), "classification"),
        (np.array(["a", "b", "a"]), "classification"),
        (np.array([0.5, 1.0, 2.0]), "regression"),
        (np.zeros((3, 2), dtype=np.float32), "regression"),
        (np.array([[0, 1], [1, 1], [0, 0]]), "multilabel"),
        (np.array([[True, False]] * 3), "multilabel"),
        (np.array([True, False, True]), "classification"),
        (np.zeros((3, 4, 4), dtype=np.uint8), "segmentation"),
    ],
)
def test_what_is_learned_follows_from_the_targets(targets, task):
    assert own_data({"a": (np.zeros((3, 4, 4)), targets)}).task == task


def test_whole_numbers_in_rows_can_be_regressed_if_one_says_so():
    rows = np.arange(30)[:, None]
    found = own_data({"a": (np.zeros((30, 4)), np.zeros((30, 1), dtype=int)), "b": (np.zeros((30, 4)), rows)})
    found.check_task("regression")
    with pytest.raises(DataError, match=r"data\['b'\]: targets have shape \(30, 1\) with values 0 to 29"):
        found.check_task(None)


def test_splits_come_from_a_column_or_a_dict(tmp_path):
    frame = rows_of_a_table().assign(split="train")
    frame.loc[frame.index % 3 == 0, "split"] = "test"
    found = stored(frame, tmp_path)
    assert (found.splits == 3).sum() == (frame["split"] == "test").sum() == found.test.sum()
    with pytest.raises(DataError, match="there is no 'train' among test"):
        own_data({"a": {"test": ARRAYS["c0"]}})
    with pytest.raises(DataError, match=r"data\['a'\]: 'valid' .*did you mean 'val'"):
        own_data({"a": {"train": ARRAYS["c0"], "valid": ARRAYS["c0"]}})
    own = {"train": ARRAYS["c0"], "test": ARRAYS["c0"], "domain": "noisy"}
    assert stored({"a": own, "b": {"train": ARRAYS["c1"]}}, tmp_path).domains == ("noisy", "all")


class Noisy(torch.utils.data.Dataset):
    def __init__(self, noise):
        self.noise = noise

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.full((4,), float(index)) + self.noise * torch.rand(4), index


def test_a_dataset_that_changes_examples_at_random_is_named_once(caplog):
    own_data({"a": Noisy(0)})
    assert not caplog.text
    own_data({"a": Noisy(1), "b": Noisy(1)})
    assert caplog.text.count("differs when it is read again") == 1
    assert "data['a']: item 0 of Noisy differs" in caplog.text
    assert "set data.augment" in caplog.text


@settings(max_examples=40, deadline=None)
@given(
    client=st.sampled_from(list(ARRAYS)),
    part=st.sampled_from([0, 1]),
    value=st.one_of(
        st.none(),
        st.integers(),
        st.text(),
        st.just(np.zeros(0)),
        st.just(np.array(["x"])),
        st.just(np.array([1 + 2j] * 6)),
        st.just(np.full((6, 2, 3), np.nan)),
        st.just([object()] * 6),
        st.just([[1, 2], [3]]),
        st.just(np.zeros((6, 9))),
        st.just(-np.ones(6, dtype=int)),
    ),
)
def test_whatever_is_wrong_is_one_line_that_names_the_client(client, part, value):
    pair = list(ARRAYS[client])
    pair[part] = value
    with pytest.raises(DataError) as caught:
        own_data({**ARRAYS, client: tuple(pair)})
    assert "\n" not in str(caught.value)
    assert "data[" in str(caught.value)


def test_whole_floats_are_classes_and_whole_numbers_are_regressed_where_the_task_says_so():
    x = np.zeros((4, 3), np.float32)
    own = own_data({"a": (x, np.array([0.0, 1.0, 2.0, 1.0]))}).of_task("classification")
    assert own.task == "classification"
    assert own.scan().classes == ("0", "1", "2")
    assert own.scan().labels.tolist() == [0, 1, 2, 1]
    with pytest.raises(DataError, match=r"data\['a'\]: the target of example 1 is 0.5; classes are whole"):
        own_data({"a": (x, np.array([0.0, 0.5, 1.0, 1.0]))}).of_task("classification")
    with pytest.raises(
        DataError, match=r"targets have shape \(4, 1\); classes have shape \(4,\), e.g. y.ravel"
    ):
        own_data({"a": (x, np.zeros((4, 1)))}).of_task("classification")
    ages = own_data({"a": (x, np.array([-3, 70, 1, 2]))}, task="regression").of_task("regression")
    assert (ages.task, ages.pieces[0].targets.dtype) == ("regression", np.float32)
    maps = own_data({"a": (np.zeros((2, 4, 4)), np.ones((2, 4, 4)))}).of_task("segmentation")
    assert maps.task == "segmentation"
    with pytest.raises(DataError, match="the targets are texts, such as 'a'"):
        own_data({"a": (x, list("abab"))}).of_task("regression")


@pytest.mark.parametrize(
    ("values", "words"),
    [([0, 255], "masks hold 0 and 255; .* give masks // 255"), ([0, 1, 255], ".*no label that is ignored")],
)
def test_masks_up_to_255_are_refused_with_what_to_do(values, words):
    masks = np.resize(np.array(values, np.uint8), (3, 4, 4))
    own = own_data({"a": (np.zeros((3, 4, 4, 3), np.uint8), masks)})
    with pytest.raises(DataError, match=rf"data\['a'\]: {words}"):
        own.check_task(None)
    own.check_task("regression")
    own_data({"a": (np.zeros((3, 4, 4, 3), np.uint8), masks.clip(0, 1))}).check_task(None)


def test_the_order_of_classes_is_in_the_file_and_in_the_fingerprint(tmp_path):
    x = np.zeros((4, 3), np.float32)
    digests = set()
    for names in (["b", "a"], ["a", "b"]):
        labels = pd.Series(pd.Categorical(list("abab"), names, ordered=True))
        found = stored({"p": (x, labels)}, tmp_path)
        assert found.classes == tuple(names)
        digests.add(found.digest)
    assert len(digests) == 2


PAIR = (np.ones((4, 2), np.float32), np.arange(4) % 2)


@pytest.mark.parametrize(
    "clients", [{"root": PAIR, "limit": PAIR}, {"name": PAIR, "bob": PAIR}, {"test": PAIR}]
)
def test_clients_with_the_names_of_keys_are_clients(clients):
    assert is_own(clients)


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        (
            {"train": PAIR, "validation": PAIR},
            "the keys 'train' and 'validation' are a split and something else",
        ),
        ({"test": PAIR, "bob": PAIR}, "the keys 'test' and 'bob' are a split and something else"),
        ({"ann": PAIR, "ann ": PAIR}, "the client 'ann' has the same name"),
        ({b"ann": PAIR, "ann": PAIR}, "the client b'ann' has the same name"),
        (
            {"a": {"train": PAIR, "domain": 1}, "b": {"train": PAIR, "domain": "1"}},
            "1 and '1' are both there in column 'domain'",
        ),
    ],
)
def test_names_of_clients_and_domains_that_are_mixed_up_are_refused(clients, words):
    with pytest.raises(DataError) as caught:
        own_data(clients)
    assert words in str(caught.value)
