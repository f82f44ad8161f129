"""Writes the tables of each round into its own file; at the end they are joined into the run's tables.

Writing a round therefore takes the same time however many rounds there were before, no round stays in memory,
and a continued run gets the tables of a run that was never interrupted. Every file holds the digest of the
one before it, so that the digest of the last file depends on all of them.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfed.record.atomic_files import growing_table, remove_file, to_table, write_bytes
from rayfed.record.readers import DamagedError, digest_of, read_packed

if TYPE_CHECKING:
    import pyarrow as pa

HISTORY = "history"
BEFORE = "before"
Tables = Mapping[str, list[dict[str, Any]]]


class History:
    """The rounds of one run on disk. Rounds count from 1."""

    def __init__(self, run: Path) -> None:
        self.path = run / HISTORY
        self._last: tuple[int, str] | None = None  # number and digest of the round that was written last
        self._rounds: int | None = None

    def write(self, round: int, row: Mapping[str, Any], tables: Tables) -> None:
        text = json.dumps({"row": row, "tables": tables, BEFORE: self.digest(round - 1)}, allow_nan=False)
        data = gzip.compress(text.encode(), compresslevel=1, mtime=0)
        write_bytes(self._file(round), data)
        self._last = (round, hashlib.sha256(data).hexdigest())
        self._rounds = round

    def digest(self, round: int) -> str:
        """The SHA-256 digest of the file of a round; empty if there is none."""
        if self._last is not None and self._last[0] == round:
            return self._last[1]
        try:
            return digest_of(self._file(round))
        except DamagedError:
            return ""

    def check_unchanged(self, round: int, digest: str) -> None:
        """Check that the files of this round and of all before it were not changed.

        Args:
            round: Number of the last round to check.
            digest: SHA-256 digest of its file. If it is empty, nothing is checked.

        Raises:
            DamagedError: A file is missing or was changed; the message names it.
        """
        for number in range(round, 0, -1):
            if not digest:
                return
            if digest_of(self._file(number)) != digest:
                raise DamagedError(f"{HISTORY}/{self._file(number).name} was changed")
            digest = str(read_packed(self._file(number), dict).get(BEFORE, ""))

    def complete(self, rounds: int) -> bool:
        """Whether the files of rounds 1 to `rounds` can all be read."""
        return all(self.entry(r) is not None for r in range(1, rounds + 1))

    def cut(self, rounds: int) -> None:
        """Remove the files of all rounds after `rounds`."""
        for file in self.path.glob("*.json.gz"):
            if file.name.split(".")[0].isdigit() and int(file.name.split(".")[0]) > rounds:
                remove_file(file)
        self._last = None
        self._rounds = rounds

    def write_tables(self, run: Path) -> None:
        """Join the tables of all rounds; writes one Parquet file per table, part by part."""
        import pyarrow as pa

        schemas: dict[str, pa.Schema] = {}
        for name, table in self._tables():
            known = schemas.get(name, table.schema)
            schemas[name] = pa.unify_schemas([known, table.schema], promote_options="permissive")
        with ExitStack() as stack:
            append = {
                name: stack.enter_context(growing_table(run / f"{name}.parquet", schema, place))
                for place, (name, schema) in enumerate(schemas.items())
            }
            for name, table in self._tables():
                append[name](table)

    def _tables(self) -> Iterator[tuple[str, pa.Table]]:
        """The tables of each round that have rows, by name."""
        for entry in self.entries():
            yield from ((name, to_table(rows)) for name, rows in entry["tables"].items() if rows)

    def entries(self) -> Iterator[dict[str, Any]]:
        """Row and tables of each round, in order, up to the first one that cannot be read."""
        for round in count(1) if self._rounds is None else range(1, self._rounds + 1):
            entry = self.entry(round)
            if entry is None:
                return
            yield entry

    def entry(self, round: int) -> dict[str, Any] | None:
        """Row and tables of one round; None if its file cannot be read."""
        try:
            entry = read_packed(self._file(round), dict)
        except DamagedError:
            return None
        return entry if _is_entry(entry, round) else None

    def _file(self, round: int) -> Path:
        return self.path / f"{round:06d}.json.gz"


def _is_entry(entry: Mapping[str, Any], round: int) -> bool:
    row = entry.get("row")
    tables = entry.get("tables")
    if not isinstance(row, dict) or row.get("round") != round or not isinstance(tables, dict):
        return False
    # Names are checked because each table becomes a file of its name.
    return all(
        name.isidentifier() and isinstance(rows, list) and all(isinstance(line, dict) for line in rows)
        for name, rows in tables.items()
    )
