"""What happened in each round, one file a round, until the tables of the run are put together from them.

So a round costs the same to write down however many there were before, nothing of it stays in memory, and a
run that is continued has the tables of one that was never interrupted. Every file holds the digest of the
one before it, so that the digest of the last one stands for all of them.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from rayfed.record.files import to_table, write_bytes, write_table
from rayfed.record.ownership import remove, written
from rayfed.record.readers import DamagedError, digest_of, read_packed

HISTORY = "history"
BEFORE = "before"
Tables = Mapping[str, list[dict[str, Any]]]


class History:
    """The rounds of one run on disk. Rounds count from 1."""

    def __init__(self, run: Path) -> None:
        self.path = run / HISTORY
        self._last: tuple[int, str] | None = None  # the round that was written last, and its digest
        self._rounds: int | None = None

    def write(self, round: int, row: Mapping[str, Any], tables: Tables) -> None:
        text = json.dumps({"row": row, "tables": tables, BEFORE: self.digest(round - 1)}, allow_nan=False)
        data = gzip.compress(text.encode(), compresslevel=1, mtime=0)
        write_bytes(self._file(round), data)
        self._last, self._rounds = (round, hashlib.sha256(data).hexdigest()), round

    def digest(self, round: int) -> str:
        """The sha256 of the file of a round; empty where there is none."""
        if self._last is not None and self._last[0] == round:
            return self._last[1]
        try:
            return digest_of(self._file(round))
        except DamagedError:
            return ""

    def check_unchanged(self, round: int, digest: str) -> None:
        """Make sure that this round and all before it are what was written.

        Args:
            round: The last one.
            digest: Of its file.

        Raises:
            DamagedError: One is missing or was changed; names it. An earlier version's files are not checked.
        """
        for number in range(round, 0, -1):
            if not digest:
                return
            if digest_of(self._file(number)) != digest:
                raise DamagedError(f"{HISTORY}/{self._file(number).name} is not what was written")
            digest = str(read_packed(self._file(number), dict).get(BEFORE, ""))

    def complete(self, rounds: int) -> bool:
        """Whether every round up to this one can be read."""
        return all(self.entry(r) is not None for r in range(1, rounds + 1))

    def cut(self, rounds: int) -> list[dict[str, Any]]:
        """Forget every later round; the rows of those that stay."""
        for file in written(self.path):
            if not file.name.split(".")[0].isdigit() or int(file.name.split(".")[0]) > rounds:
                remove(file)
        self._last, self._rounds = None, rounds
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
        for round in count(1) if self._rounds is None else range(1, self._rounds + 1):
            entry = self.entry(round)
            if entry is None:
                return
            yield entry

    def entry(self, round: int) -> dict[str, Any] | None:
        """Row and tables of one round; None where they cannot be read."""
        try:
            entry = read_packed(self._file(round), dict)
        except DamagedError:
            return None
        return entry if _is_entry(entry, round) else None

    def _file(self, round: int) -> Path:
        return self.path / f"{round:06d}.json.gz"


def _is_entry(entry: Mapping[str, Any], round: int) -> bool:
    row, tables = entry.get("row"), entry.get("tables")
    if not isinstance(row, dict) or row.get("round") != round or not isinstance(tables, dict):
        return False
    # A table is a file of its name.
    return all(
        name.isidentifier() and isinstance(rows, list) and all(isinstance(line, dict) for line in rows)
        for name, rows in tables.items()
    )
