"""Writes files of a run: each one completely or not at all, or line by line."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfed import arrow_columns
from rayfed.errors import ConfigError, StorageError

if TYPE_CHECKING:
    import pyarrow as pa


class InTheWayError(ConfigError, StorageError):
    """A folder is in the place of a file that a run must write or remove; it is left unchanged."""


def remove_file(path: Path) -> None:
    """Remove a file, if it exists.

    Raises:
        InTheWayError: A folder is in its place.
        OSError: It cannot be removed.
    """
    _refuse_folder(path)
    path.unlink(missing_ok=True)


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise InTheWayError(f"cannot write {path}: a folder is in its place; move it away")


@contextmanager
def whole_file(path: Path, place: int = 0) -> Iterator[Path]:
    """The path of a temporary file, which is moved to `path` when the block has ended without an error.

    Args:
        path: The file to write; its folder is created.
        place: Number that no other file has that this thread is writing at the same time.

    Raises:
        StorageError: The disk is full, or the folder cannot be written.
        InTheWayError: A folder is in its place.
    """
    _refuse_folder(path)
    where = path.with_name(f".rayfed-{os.getpid()}-{threading.get_native_id()}-{place}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield where
            where.replace(path)
        finally:
            with suppress(OSError):
                where.unlink(missing_ok=True)
    except OSError as err:
        raise _storage_error(path, err) from err


def drop_temporaries(root: Path) -> None:
    """Remove the temporary files that killed processes left in the folder of a run, or of several."""
    for pattern in ("", "*/", "checkpoints/*/"):
        for file in root.glob(f"{pattern}.rayfed-*.tmp"):
            file.unlink(missing_ok=True)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with the path of a temporary file, then move that file to `path`, as `whole_file` does."""
    with whole_file(path) as where:
        write(where)


def _storage_error(path: Path, err: OSError) -> StorageError:
    return StorageError(f"cannot write {path}: {os.strerror(err.errno) if err.errno else err}")


class GrowingFile:
    """A text file to which whole lines are appended, and which is replaced completely or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = -1  # bytes that this object has written; -1: none yet

    def write(self, lines: Iterable[str]) -> None:
        """Replace the file.

        Raises:
            StorageError: As of `write_whole`.
        """
        with whole_file(self.path) as where:
            with where.open("w", encoding="utf-8", newline="") as file:
                file.writelines(lines)
            size = where.stat().st_size
        self._size = size

    def append(self, lines: str) -> bool:
        """Append lines, unless the file is not what this object has written: then it has to be replaced.

        A crash may cut the last line off, so readers take no text after the last line break for a line.

        Returns:
            Whether they were appended.

        Raises:
            StorageError: The disk is full or the file cannot be written.
        """
        data = lines.encode()
        try:
            if not self._is_untouched():
                return False
            number = os.open(self.path, os.O_WRONLY | os.O_APPEND)
            try:
                while data:
                    done = os.write(number, data)
                    self._size += done
                    data = data[done:]
            finally:
                os.close(number)
        except OSError as err:
            raise _storage_error(self.path, err) from err
        return True

    def _is_untouched(self) -> bool:
        try:
            facts = self.path.lstat()
        except OSError:
            return False
        return stat.S_ISREG(facts.st_mode) and facts.st_size == self._size


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda p: p.write_text(text))


def write_bytes(path: Path, data: bytes) -> None:
    write_whole(path, lambda p: p.write_bytes(data))


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a Parquet file; its columns are all keys, in order of appearance."""
    write_table(path, to_table(rows))


def to_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    names = dict.fromkeys(key for row in rows for key in row)
    return arrow_columns.table({key: [row.get(key) for row in rows] for key in names})


def write_table(path: Path, table: pa.Table) -> None:
    import pyarrow.parquet as pq

    write_whole(path, lambda p: pq.write_table(table, p))


PART = 50_000
"""Rows that a table keeps in memory before they are written."""


@contextmanager
def growing_table(path: Path, schema: pa.Schema, place: int = 0) -> Iterator[Callable[[pa.Table], None]]:
    """A function that appends rows to a Parquet file, which is written part by part, all of it or not at all.

    Args:
        schema: Columns of the whole table; those that appended rows lack are empty there.
        place: As of `whole_file`.

    Raises:
        StorageError: As of `whole_file`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    waiting = [pa.Table.from_batches([], schema)]
    count = 0

    def write() -> None:
        nonlocal count
        writer.write_table(pa.concat_tables(waiting, promote_options="permissive"))
        del waiting[1:]
        count = 0

    def add(table: pa.Table) -> None:
        nonlocal count
        waiting.append(table)
        count += len(table)
        if count >= PART:
            write()

    with whole_file(path, place) as where, pq.ParquetWriter(where, schema) as writer:
        yield add
        if count:
            write()
