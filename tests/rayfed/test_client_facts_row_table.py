"""A table of row numbers behaves as the dictionaries it was made from, in fewer and sharable arrays."""

import pickle

import numpy as np
import pytest

from rayfed.client_facts import RowTable


def test_it_reads_as_the_dictionaries_it_was_made_from():
    known = {
        "c10-b": {"train": np.array([4, 9]), "val": np.array([], dtype=np.int64), "test": np.array([1])},
        "domain:ä": {"test": np.array([7, 8, 9])},
        "c2-a": {"train": np.array([3])},
        "c2": {},
    }
    for table in (RowTable(known), pickle.loads(pickle.dumps(RowTable(known)))):
        assert list(table) == list(known)
        assert len(table) == 4
        for name, own in known.items():
            assert {k: v.tolist() for k, v in table[name].items()} == {k: v.tolist() for k, v in own.items()}
        assert "c3" not in table
        with pytest.raises(KeyError):
            table["zz"]


def test_it_is_a_few_arrays_however_many_clients_there_are():
    def buffers(count):
        splits = {f"c{i}": {"train": np.arange(3) + i, "test": np.arange(1)} for i in range(count)}
        outside = []
        inside = pickle.dumps(RowTable(splits), protocol=5, buffer_callback=outside.append)
        return len(inside), len(outside)

    few, many = buffers(10), buffers(1000)
    assert many[1] == few[1] <= 5
    assert many[0] < few[0] + 200


def test_an_empty_table():
    assert dict(RowTable({})) == {}
