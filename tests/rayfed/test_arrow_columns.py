"""Columns made through buffers are those of Arrow, and pandas is not imported."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from rayfed import arrow_columns

LISTS = [
    [1, 2, -3],
    [1, None, 2**40],
    [0.5, 1, None, float("nan")],
    [True, None, False] * 5,
    ["a", "", None, "ä€"],
    [],
    [None, None],
    [np.float32(1), np.float32(2)],
    [{"a": 1}],
    ["x", "y"],
]


@pytest.mark.parametrize("values", LISTS, ids=str)
def test_a_column_of_values_is_that_of_arrow(values):
    wanted, found = pa.array(values), arrow_columns.column(values)
    assert found.type == wanted.type
    assert str(found.to_pylist()) == str(wanted.to_pylist())
    assert found.null_count == wanted.null_count
    found.validate(full=True)


@pytest.mark.parametrize("kind", ["int64", "uint8", "int32", "float32", "float64"])
def test_numbers_are_viewed_and_not_copied(kind):
    values = np.arange(7).astype(kind)
    found = arrow_columns.column(values)
    assert found.equals(pa.array(values))
    read = arrow_columns.numbers(found[2:])
    assert read.tolist() == [2, 3, 4, 5, 6]
    assert read.dtype == kind
    assert np.shares_memory(read, values)
    assert arrow_columns.numbers(arrow_columns.column(values[:0])).tolist() == []


def test_a_kind_that_is_given_is_used():
    assert arrow_columns.column([0, 1], "uint8").type == pa.uint8()
    assert arrow_columns.column(np.arange(3), "uint8").equals(pa.array([0, 1, 2], pa.uint8()))
    assert arrow_columns.column(np.array([True, False]), "uint8").to_pylist() == [1, 0]
    assert arrow_columns.column(np.array([True, False])).to_pylist() == [True, False]
    assert arrow_columns.column([None, "a"], "string").to_pylist() == [None, "a"]


def test_repeated_texts():
    found = arrow_columns.column_of_few(["a", "bc"], np.array([1, 0, 1]))
    assert found.equals(pa.array(["bc", "a", "bc"]))


def test_too_many_bytes_are_left_to_arrow(monkeypatch):
    monkeypatch.setattr(arrow_columns, "LARGEST", 3)
    assert arrow_columns.column(["abc", "d"]).to_pylist() == ["abc", "d"]


def test_pandas_is_not_imported(tmp_path):
    code = (
        "import sys, numpy as np, pyarrow.parquet as pq; from rayfed import arrow_columns as c; "
        "t = c.table({'a': [1, None], 'b': ['x', 'y'], 'c': c.column_of_few(['p'], np.zeros(2, int))}); "
        f"pq.write_table(t, {str(tmp_path / 'x.parquet')!r}); c.numbers(c.column(np.arange(3))); "
        f"print(pq.ParquetFile({str(tmp_path / 'x.parquet')!r}).read().to_pylist()); "
        "assert 'pandas' not in sys.modules"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "[{'a': 1, 'b': 'x', 'c': 'p'}, {'a': None, 'b': 'y', 'c': 'p'}]"
