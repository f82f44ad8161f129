"""The tables of all rounds become one file each, whatever columns and types a round has."""

import pyarrow.parquet as pq
import pytest

from rayfed.errors import StorageError
from rayfed.record import atomic_files
from rayfed.record.history import History

ROUNDS = [
    {"scores": [{"round": 1, "value": 1}], "empty": []},
    {"scores": [{"round": 2, "value": 0.5, "name": "a"}, {"round": 2, "value": None, "name": None}]},
    {"weights": [{"round": 3, "weight": 2}], "scores": []},
    {"weights": [{"round": 4, "weight": 3}], "scores": [{"round": 4, "name": "b"}]},
]


@pytest.fixture
def history(tmp_path):
    found = History(tmp_path)
    for number, tables in enumerate(ROUNDS, 1):
        found.write(number, {"round": number}, tables)
    return found


@pytest.mark.parametrize("part", [1, 2, 100])
def test_tables_are_joined_part_by_part(part, history, tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_files, "PART", part)
    history.write_tables(tmp_path)
    assert {file.name for file in tmp_path.glob("*")} == {"history", "scores.parquet", "weights.parquet"}
    scores = pq.read_table(tmp_path / "scores.parquet")
    assert [str(column.type) for column in scores.schema] == ["int64", "double", "string"]
    assert scores.to_pylist() == [
        {"round": 1, "value": 1.0, "name": None},
        {"round": 2, "value": 0.5, "name": "a"},
        {"round": 2, "value": None, "name": None},
        {"round": 4, "value": None, "name": "b"},
    ]
    assert (
        pq.read_table(tmp_path / "weights.parquet").to_pylist() == ROUNDS[2]["weights"] + ROUNDS[3]["weights"]
    )


def test_a_table_that_cannot_be_written_is_named(history, tmp_path):
    (tmp_path / "weights.parquet").mkdir()
    with pytest.raises(StorageError, match=r"weights\.parquet"):
        history.write_tables(tmp_path)
    assert not [file for file in tmp_path.iterdir() if file.name.endswith(".tmp")]
