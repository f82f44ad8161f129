"""Traces: files that list availability, dropout and speed of clients round by round."""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rayfed.errors import ConfigError, unknown

KEY = "faults.trace"
VALUE_COLUMNS = ("available", "dropout", "speed")
COLUMNS = ("round", "client", *VALUE_COLUMNS)
YES = ("1", "true")
NO = ("0", "false")


@dataclass(frozen=True, kw_only=True)
class TraceEntry:
    """The values of a trace for one client in one round; None where the trace has no value.

    Attributes:
        available: Whether the client can be reached.
        dropout: Whether all answers of the client are lost.
        speed: Speed of the client in the unit of `faults.speed`.
    """

    available: bool | None = None
    dropout: bool | None = None
    speed: float | None = None


Trace: TypeAlias = dict[tuple[int, str], TraceEntry]
"""Entries by round, counted from 0, and client."""


def read_trace(file: str, clients: Collection[str]) -> Trace:
    """Read a CSV or Parquet file with the columns round (from 1), client, and any of VALUE_COLUMNS.

    Args:
        file: Path that ends with .csv or .parquet.
        clients: Ids of all clients of the experiment.

    Raises:
        ConfigError: The file cannot be read, or a value is wrong; names the file, the line and the value.
    """
    path = Path(file)
    readers = {".csv": _csv_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise ConfigError(f"{KEY}: {file!r} must end in .csv or .parquet")
    trace: Trace = {}
    try:
        for place, row in readers[path.suffix](path):
            where = f"{KEY}: {file!r}, {place}"
            number = _round(row.get("round"), where)
            client = _client(row.get("client"), clients, where)
            if (number - 1, client) in trace:
                raise ConfigError(f"{where}: round {number} of client {client!r} is there twice; remove one")
            trace[number - 1, client] = TraceEntry(
                available=_flag(row.get("available"), f"{where}: available"),
                dropout=_flag(row.get("dropout"), f"{where}: dropout"),
                speed=_speed(row.get("speed"), f"{where}: speed"),
            )
    except OSError as err:
        raise ConfigError(f"{KEY}: cannot read {file!r}: {err.strerror or 'it has another format'}") from err
    except (UnicodeDecodeError, csv.Error) as err:
        raise ConfigError(f"{KEY}: {file!r} is not a CSV file: {err}") from err
    return trace


def _csv_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.DictReader(lines)
        _check_columns(reader.fieldnames or (), path)
        for row in reader:
            place = f"line {reader.line_num}"
            if None in row or None in row.values():
                wanted = len(reader.fieldnames or ())
                raise ConfigError(
                    f"{KEY}: {str(path)!r}, {place}: there must be {wanted} values, one for each column"
                )
            yield place, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as err:
        raise ConfigError(f"{KEY}: {str(path)!r} is not a Parquet file") from err
    _check_columns(table.column_names, path)
    yield from ((f"row {i}", row) for i, row in enumerate(table.to_pylist(), start=1))


def _check_columns(present: Collection[str], path: Path) -> None:
    for name in present:
        if name not in COLUMNS:
            raise ConfigError(f"{KEY}: {str(path)!r}: " + unknown("column", name, COLUMNS))
    for name in COLUMNS[:2]:
        if name not in present:
            raise ConfigError(f"{KEY}: {str(path)!r} has no column {name!r}; it needs round and client")
    if len(present) != len(set(present)) or not set(present) & set(VALUE_COLUMNS):
        raise ConfigError(
            f"{KEY}: {str(path)!r} needs one or more of the columns {', '.join(VALUE_COLUMNS)}, each once"
        )


def _round(value: Any, where: str) -> int:
    number = _number(value)
    if number < 1 or number != int(number):
        raise ConfigError(f"{where}: round {value!r} is not a whole number from 1 on")
    return int(number)


def _client(value: Any, clients: Collection[str], where: str) -> str:
    if value not in clients:
        names = sorted(clients)
        raise ConfigError(
            f"{where}: client {value!r} does not exist; the clients are {names[0]} to {names[-1]}"
        )
    return str(value)


def _flag(value: Any, where: str) -> bool | None:
    text = "" if value is None else str(value).strip().lower()
    if text in ("", *YES, *NO):
        return None if not text else text in YES
    raise ConfigError(f"{where} {value!r} is not allowed: write 1, 0, true or false, or leave it empty")


def _speed(value: Any, where: str) -> float | None:
    if value is None or str(value).strip() == "":
        return None
    number = _number(value)
    if number <= 0:
        raise ConfigError(f"{where} {value!r} is not a finite number above 0")
    return number


def _number(value: Any) -> float:
    """The value as a finite number, or -1, which no column allows, if it is none."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return -1.0
    return number if math.isfinite(number) else -1.0
