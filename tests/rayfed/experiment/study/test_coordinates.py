"""Coordinates of cells in all their forms, and names of folders that are never the same."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfed.errors import ConfigError
from rayfed.experiment.study.coordinates import find_key, folders_of, keys_of, labels_of

VALUES = st.one_of(st.text(max_size=8), st.integers(-5, 5), st.floats(allow_nan=False), st.none())


def test_tuples_dicts_and_pairs_name_the_same_cells():
    names, by_tuple = keys_of({("a", 0): 1, ("b", 0): 2}, None)
    assert names == ("method", "seed")
    pairs = [({"method": "a", "seed": np.int64(0)}, 1), ({"seed": 0, "method": "b"}, 2)]
    assert keys_of(pairs, None) == (names, by_tuple)
    assert find_key({"seed": 0, "method": "b"}, names) == find_key(("b", np.int64(0)), names) == ("b", 0)
    assert keys_of({"a": 1}, None) == (("method",), {("a",): 1})
    assert keys_of({("a", 8, 0): 1}, ("method", "rank", "seed"))[0] == ("method", "rank", "seed")


@pytest.mark.parametrize(
    ("cells", "names", "message"),
    [
        ({}, None, "there are no cells"),
        ([(("a", 0), 1), (("a", 0), 2)], None, r"two cells have the coordinates a, seed=0"),
        ([({"method": "a"}, 1), ({"seed": 0}, 2)], None, "and other cells have method"),
        ({(1, 2, 3, 4, 5): 1}, None, "has 5 coordinates and no names"),
        ({("a", object()): 1}, None, "is no coordinate; give a text or a number"),
        ([({"round": 1}, 1)], None, "'round' cannot be the name of a coordinate"),
    ],
)
def test_wrong_coordinates_are_named(cells, names, message):
    with pytest.raises(ConfigError, match=message):
        keys_of(cells, names)


@settings(max_examples=50)
@given(st.lists(st.tuples(VALUES, VALUES, st.integers(0, 3)), unique_by=repr, min_size=1, max_size=8))
def test_each_cell_has_a_folder_of_its_own_and_each_row_a_label_of_its_own(keys):
    keys = list(dict.fromkeys(keys))
    names = ("method", "rank", "seed")
    folders = folders_of(keys, names)
    assert len({name.casefold() for name in folders.values()}) == len(keys)
    assert all(re.fullmatch(r"[\w=,+-][\w.=,+-]*", name) and len(name) < 150 for name in folders.values())
    labels = labels_of(keys, names)
    assert len(set(labels.values())) == len(labels) == len({key[:2] for key in keys})


def test_names_say_what_differs():
    keys = [("a", 0.1, "art", 0), ("a", 0.2, "art", 0), ("b", 0.1, "art", 1)]
    names = ("method", "train.lr", "part", "seed")
    assert folders_of(keys, names)[keys[0]] == "a-train.lr=0.1-art-seed0"
    assert list(labels_of(keys, names).values()) == ["a train.lr=0.1", "a train.lr=0.2", "b train.lr=0.1"]
    assert list(labels_of(keys[:1], names).values()) == ["a"]
