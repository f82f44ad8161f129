"""Traces of clients from a file: who could be reached, dropped out, and how fast it was, round by round."""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rayfed.errors import ConfigError, unknown

KEY = "faults.trace"
SAYS = ("available", "dropout", "speed")
COLUMNS = ("round", "client", *SAYS)
YES, NO = ("1", "true"), ("0", "false")


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a trace says about one client in one round; None: nothing.

    Attributes:
        available: Whether it can take part.
        dropout: Whether its answers are lost.
        speed: Its speed, in the unit of `faults.speed`.
    """

    available: bool | None = None
    dropout: bool | None = None
    speed: float | None = None


Trace: TypeAlias = dict[tuple[int, str], Said]
"""By round, from 0, and client."""


def read_trace(file: str, clients: Collection[str]) -> Trace:
    """Read a CSV or Parquet file with the columns round (from 1), client, and any of SAYS.

    Args:
        file: Path; the ending says what it is.
        clients: Everybody who may be named.

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
            key = _round(row.get("round"), where) - 1, _client(row.get("client"), clients, where)
            if key in trace:
                raise ConfigError(f"{where}: round {key[0] + 1} of client {key[1]!r} is there twice")
            trace[key] = Said(
                available=_flag(row.get("available"), f"{where}: available"),
                dropout=_flag(row.get("dropout"), f"{where}: dropout"),
                speed=_speed(row.get("speed"), f"{where}: speed"),
            )
    except OSError as err:
        raise ConfigError(f"{KEY}: cannot read {file!r}: {err.strerror or 'not a file of its kind'}") from err
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
                raise ConfigError(f"{KEY}: {str(path)!r}, {place}: there must be {wanted} values")
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


def _check_columns(found: Collection[str], path: Path) -> None:
    for name in found:
        if name not in COLUMNS:
            raise ConfigError(f"{KEY}: {str(path)!r}: " + unknown("column", name, COLUMNS))
    for name in COLUMNS[:2]:
        if name not in found:
            raise ConfigError(f"{KEY}: {str(path)!r} has no column {name!r}; it needs round and client")
    if len(found) != len(set(found)) or not set(found) & set(SAYS):
        raise ConfigError(
            f"{KEY}: {str(path)!r} needs one or more of the columns {', '.join(SAYS)}, each once"
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
    """A finite number, or -1, which no column allows."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return -1.0
    return number if math.isfinite(number) else -1.0
