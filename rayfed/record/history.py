"""What happened in each round, one file a round, until the tables of the run are put together from them.

So a round costs the same to write down however many there were before, nothing of it stays in memory, and a
run that is continued has the tables of one that was never interrupted.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rayfed.record.files import to_table, write_bytes, write_table

FOLDER = "history"
Tables = Mapping[str, list[dict[str, Any]]]


class History:
    """The rounds of one run on disk. Rounds count from 1."""

    def __init__(self, run: Path) -> None:
        self.path = run / FOLDER

    def write(self, round: int, row: Mapping[str, Any], tables: Tables) -> None:
        text = json.dumps({"row": row, "tables": tables}, allow_nan=False)
        write_bytes(self._file(round), gzip.compress(text.encode(), compresslevel=1, mtime=0))

    def complete(self, rounds: int) -> bool:
        """Whether every round up to this one can be read."""
        return all(self.read(r) is not None for r in range(1, rounds + 1))

    def cut(self, rounds: int) -> list[dict[str, Any]]:
        """Forget every later round; the rows of those that stay."""
        for file in self.path.glob("*.json.gz"):
            if not file.name.split(".")[0].isdigit() or int(file.name.split(".")[0]) > rounds:
                file.unlink()
        return [entry["row"] for entry in self.entries()]

    def write_tables(self, run: Path) -> None:
        """Put the tables of all rounds together, one Parquet file each."""
        import pyarrow as pa

        parts: dict[str, list[pa.Table]] = {}
        for entry in self.entries():
            for name, rows in entry["tables"].items():
                if rows:
                    parts.setdefault(name, []).append(to_table(rows))
        for name, tables in parts.items():
            write_table(run / f"{name}.parquet", pa.concat_tables(tables, promote_options="permissive"))

    def entries(self) -> Iterator[dict[str, Any]]:
        """Row and tables of every round that can be read, in order."""
        for round in range(1, 1 + len(list(self.path.glob("*.json.gz")))):
            entry = self.read(round)
            if entry is None:
                return
            yield entry

    def read(self, round: int) -> dict[str, Any] | None:
        """Row and tables of one round; None where they cannot be read."""
        try:
            entry = json.loads(gzip.decompress(self._file(round).read_bytes()))
            return entry if isinstance(entry["row"], dict) and isinstance(entry["tables"], dict) else None
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            return None

    def _file(self, round: int) -> Path:
        return self.path / f"{round:06d}.json.gz"
