"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then move it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda p: p.write_text(text))


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows as a table; columns are the union of keys in order of appearance."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = dict.fromkeys(key for row in rows for key in row)
    table = pa.table({key: [row.get(key) for row in rows] for key in columns})
    write_whole(path, lambda p: pq.write_table(table, p))
