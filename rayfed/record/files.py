"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfed.errors import StorageError

if TYPE_CHECKING:
    import pyarrow as pa


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then move it into place.

    Raises:
        StorageError: The disk is full, or the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        temporary.replace(path)
    except OSError as err:
        why = os.strerror(err.errno) if err.errno else str(err)
        raise StorageError(f"cannot write {path}: {why}") from err
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda p: p.write_text(text))


def write_bytes(path: Path, data: bytes) -> None:
    write_whole(path, lambda p: p.write_bytes(data))


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows as a table; columns are the union of keys in order of appearance."""
    write_table(path, to_table(rows))


def to_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    import pyarrow as pa

    columns = dict.fromkeys(key for row in rows for key in row)
    return pa.table({key: [row.get(key) for row in rows] for key in columns})


def write_table(path: Path, table: pa.Table) -> None:
    import pyarrow.parquet as pq

    write_whole(path, lambda p: pq.write_table(table, p))


def read_table(folder: Path, table: str) -> Sequence[Mapping[str, Any]]:
    """Rows of `<table>.parquet` of a run, or none."""
    import pyarrow.parquet as pq

    path = folder / f"{table}.parquet"
    rows: Sequence[Mapping[str, Any]] = pq.read_table(path).to_pylist() if path.exists() else []
    return rows
