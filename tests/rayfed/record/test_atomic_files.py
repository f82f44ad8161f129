"""Files that grow: whole lines only, the table of all parts, and nothing of others is appended to."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayfed.errors import StorageError
from rayfed.record import atomic_files
from rayfed.record.atomic_files import GrowingFile, growing_table, to_table


def test_a_file_grows_without_being_written_again(tmp_path):
    path = tmp_path / "rounds.jsonl"
    file = GrowingFile(path)
    assert not file.append("1\n")  # it was never written
    file.write(["1\n", "2\n"])
    before = path.stat().st_ino
    assert file.append("3\n4\n")
    assert path.read_text() == "1\n2\n3\n4\n"
    assert path.stat().st_ino == before


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_text("1\n2"),
        lambda path: path.unlink(),
        lambda path: path.rename(path.with_suffix(".old")) and path.mkdir(),
        lambda path: (
            path.rename(path.with_suffix(".old")).exists() and path.symlink_to(path.with_suffix(".old"))
        ),
    ],
)
def test_nothing_is_appended_to_a_file_that_somebody_changed(change, tmp_path):
    file = GrowingFile(tmp_path / "rounds.jsonl")
    file.write(["1\n", "2\n"])
    change(file.path)
    assert not file.append("3\n")
    assert "3" not in "".join(p.read_text() for p in tmp_path.iterdir() if p.is_file())


def test_a_full_disk_is_told_and_what_fitted_is_replaced_later(tmp_path, monkeypatch):
    file = GrowingFile(tmp_path / "rounds.jsonl")
    file.write(["1\n"])
    written = atomic_files.os.write

    def full(number, data):
        if len(data) < 2:
            raise OSError(28, "No space left on device")
        return written(number, data[:2])

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="No space left"):
        patch.setattr(atomic_files.os, "write", full)
        file.append("2345\n")
    assert file.path.read_text() == "1\n2345"  # without its line break
    file.write(["1\n"])
    assert file.append("2\n")
    assert file.path.read_text() == "1\n2\n"


def test_parts_of_a_table_become_one_table(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_files, "PART", 3)
    parts = [to_table([{"a": i, "b": None}, {"a": i + 1, "b": 0.5 * i}]) for i in range(5)]
    schema = pa.unify_schemas([p.schema for p in parts], promote_options="permissive")
    with growing_table(tmp_path / "t.parquet", schema) as add:
        for part in parts:
            add(part)
            assert not (tmp_path / "t.parquet").exists()
    read = pq.ParquetFile(tmp_path / "t.parquet")
    assert read.num_row_groups == 3  # two parts each, and the last one
    assert read.read().to_pylist() == [row for part in parts for row in part.to_pylist()]


def test_a_table_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_files, "PART", 1)
    part = to_table([{"a": 1}])
    with pytest.raises(ZeroDivisionError), growing_table(tmp_path / "t.parquet", part.schema) as add:
        add(part)
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
