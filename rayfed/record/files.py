"""Writes files atomically: each one completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfed.errors import StorageError
from rayfed.record.ownership import make_folder, note, temporary

if TYPE_CHECKING:
    import pyarrow as pa


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with the path of a temporary file, then move that file to `path`.

    In a run folder, the name is first added to the list of the run's files.

    Raises:
        StorageError: The disk is full, the folder cannot be written, or a file that the run did not write has
            this name.
    """
    try:
        make_folder(path.parent)
        note(path)
        where = temporary(path)
        try:
            write(where)
            where.replace(path)
        finally:
            with suppress(OSError):
                where.unlink(missing_ok=True)
    except OSError as err:
        why = os.strerror(err.errno) if err.errno else str(err)
        raise StorageError(f"cannot write {path}: {why}") from err


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda p: p.write_text(text))


def write_bytes(path: Path, data: bytes) -> None:
    write_whole(path, lambda p: p.write_bytes(data))


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a Parquet file; its columns are all keys, in order of appearance."""
    write_table(path, to_table(rows))


def to_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    import pyarrow as pa

    columns = dict.fromkeys(key for row in rows for key in row)
    return pa.table({key: [row.get(key) for row in rows] for key in columns})


def write_table(path: Path, table: pa.Table) -> None:
    import pyarrow.parquet as pq

    write_whole(path, lambda p: pq.write_table(table, p))
