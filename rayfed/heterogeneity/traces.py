"""Traces: files that list availability, dropout and speed of clients or devices.

The formats of devices are those of FedScale, as the README in benchmark/dataset/data/device_info of its
repository describes them: a pickled dictionary by device; or the same numbers in a CSV or Parquet table.
"""

from __future__ import annotations

import csv
import math
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rayfed.client_facts import ClientNames, ClientTable, Integers
from rayfed.errors import ConfigError, one_line, unknown
from rayfed.seeds import generator

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


Numbers: TypeAlias = npt.NDArray[np.float64]
BYTES_PER_KILOBIT = 125.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Devices:
    """Speed and bandwidth of the device of each client.

    Attributes:
        clients: Ids of the clients.
        which: Index of each client's device, shape (N,).
        speed: Speed of computation of each of the D devices, relative to the median device, shape (D,).
        bandwidth: Bytes per second of each device, shape (D,).
    """

    clients: ClientNames
    which: Integers
    speed: Numbers
    bandwidth: Numbers

    def of(self, client: str) -> tuple[float, float]:
        """Speed and bandwidth of the device of a client."""
        place = self.which[self.clients.position(client)]
        return float(self.speed[place]), float(self.bandwidth[place])


@dataclass(frozen=True, kw_only=True, eq=False)
class Sessions:
    """When the device of each client can be reached, in a pattern that repeats itself.

    Attributes:
        clients: Ids of the clients.
        which: Index of each client's device, shape (N,).
        first: Index of the first session of each of the D devices, then the number S of sessions, shape
            (D + 1,).
        start, end: Virtual seconds in which a session begins and ends, shape (S,).
        period: Seconds after which the sessions of a device are repeated, shape (D,).
    """

    clients: ClientNames
    which: Integers
    first: Integers
    start: Numbers
    end: Numbers
    period: Numbers

    def is_open(self, client: str, time: float) -> bool:
        """Whether a client can be reached at this virtual time, in seconds."""
        device = self.which[self.clients.position(client)]
        own = slice(self.first[device], self.first[device + 1])
        now = time % self.period[device]
        return bool(((self.start[own] <= now) & (now <= self.end[own])).any())

    def wait(self, time: float) -> float:
        """Virtual seconds until the next session of any client begins; 0 if there is none."""
        counts = np.diff(self.first)
        used = np.repeat(np.isin(np.arange(len(counts)), self.which), counts)
        waits = (self.start - time) % np.repeat(self.period, counts)
        return float(waits[used].min()) if used.any() else 0.0


def read_devices(file: str, clients: ClientTable, seed: int) -> Devices:
    """Read speeds: `computation`, milliseconds of an example, and `communication`, kilobits per second.

    Args:
        file: Path; .csv and .parquet are tables with these columns and `client`, anything else is a pickle.
        clients: All clients. Where the file names none of them, each gets a device of the file at random.

    Raises:
        ConfigError: The file cannot be read, a number is not above 0, or a client is missing.
    """
    key = "faults.devices"
    entries = _entries(key, file, ("computation", "communication"))
    pairs = [[_last(e["computation"]), _last(e["communication"])] for e in entries.values()]
    numbers = _floats(key, file, pairs)
    if not (numbers > 0).all():
        raise ConfigError(f"{key}: {file!r} has a number that is not above 0")
    return Devices(
        clients=clients.names,
        which=_assign_devices(key, file, list(entries), clients, seed),
        speed=np.median(numbers[:, 0]) / numbers[:, 0],
        bandwidth=numbers[:, 1] * BYTES_PER_KILOBIT,
    )


def read_sessions(file: str, clients: ClientTable, seed: int) -> Sessions:
    """Read availability: the seconds `active` and `inactive` at which sessions begin and end, `finish_time`.

    Args:
        file: Path; .csv and .parquet are tables with one session in a row, anything else is a pickle of
            dictionaries with lists.
        clients: All clients. Where the file names none of them, each gets a device of the file at random.

    Raises:
        ConfigError: The file cannot be read, a session has no beginning or no end, ends before it begins or
            after `finish_time`, or a client is missing.
    """
    key = "faults.sessions"
    entries = _entries(key, file, ("active", "inactive", "finish_time"))
    starts = [np.atleast_1d(e["active"]) for e in entries.values()]
    ends = [np.atleast_1d(e["inactive"]) for e in entries.values()]
    for name, begins, stops in zip(entries, starts, ends, strict=True):
        if len(begins) != len(stops):
            raise ConfigError(
                f"{key}: {file!r} has {len(begins)} values of active and {len(stops)} of inactive for "
                f"{name!r}; each session needs both"
            )
    counts = [len(start) for start in starts]
    start, end = (_floats(key, file, list(chain.from_iterable(parts))) for parts in (starts, ends))
    period = _floats(key, file, [_last(e["finish_time"]) for e in entries.values()])
    last = np.repeat(period, counts)
    if not ((start >= 0) & (start <= end) & (end <= last)).all() or not (period > 0).all():
        raise ConfigError(
            f"{key}: {file!r} has a session that is not within 0 and finish_time, or ends before it begins"
        )
    return Sessions(
        clients=clients.names,
        which=_assign_devices(key, file, list(entries), clients, seed),
        first=np.cumsum([0, *counts]),
        start=start,
        end=end,
        period=period,
    )


def _last(value: Any) -> Any:
    """The value of a device, which a table may repeat in several rows."""
    return value[-1] if isinstance(value, list) and value else value


def _floats(key: str, file: str, values: Sequence[Any]) -> Numbers:
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as err:
        raise ConfigError(f"{key}: {file!r} holds something that is no number ({one_line(err)})") from err
    if not np.isfinite(numbers).all():
        raise ConfigError(f"{key}: {file!r} holds a number that is not finite")
    return numbers


def _assign_devices(key: str, file: str, devices: Sequence[str], clients: ClientTable, seed: int) -> Integers:
    """Index of the device of each client: that of its name, or a random one if no client is named."""
    if not any(device in clients for device in devices):
        return generator(seed, key).integers(len(devices), size=len(clients))
    index = {device: place for place, device in enumerate(devices)}
    if missing := [name for name in clients if name not in index]:
        raise ConfigError(f"{key}: {file!r} names clients, but not {missing[0]!r}; add it, or name none")
    return np.array([index[name] for name in clients])


def _entries(key: str, file: str, columns: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
    """The values of each device by its name; of a table with several rows of a device, lists of them."""
    readers: Mapping[str, Callable[[Path], Mapping[Any, Any]]] = {".csv": _table, ".parquet": _table}
    try:
        table = readers.get(Path(file).suffix, _read_pickle)(Path(file))
        entries = {str(name): {column: own[column] for column in columns} for name, own in table.items()}
    except OSError as err:
        raise ConfigError(f"{key}: cannot read {file!r}: {err.strerror or 'it has another format'}") from err
    except KeyError as err:
        wanted = ", ".join(columns)
        raise ConfigError(f"{key}: {file!r} has no {err.args[0]!r}; it needs client, {wanted}") from err
    except (AttributeError, TypeError, ValueError, EOFError, pickle.UnpicklingError) as err:
        raise ConfigError(f"{key}: {file!r} is not a trace of devices: {one_line(err)}") from err
    if not entries:
        raise ConfigError(f"{key}: {file!r} is empty")
    return entries


def _table(path: Path) -> Mapping[Any, Any]:
    import pyarrow.csv
    import pyarrow.parquet as pq

    table = pyarrow.csv.read_csv(path) if path.suffix == ".csv" else pq.read_table(path)
    columns = {name: table[name].to_pylist() for name in table.column_names}
    entries: dict[str, dict[str, list[Any]]] = {}
    for place, device in enumerate(columns["client"]):
        own = entries.setdefault(str(device), {name: [] for name in columns})
        for name, values in columns.items():
            own[name].append(values[place])
    return entries


class _PlainUnpickler(pickle.Unpickler):
    """Reads dictionaries, lists, numbers and strings only, so that no code of the file is run."""

    ALLOWED = frozenset(
        [("_codecs", "encode"), ("numpy", "dtype")]
        + [(f"numpy.{core}.multiarray", "scalar") for core in ("core", "_core")]
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, and only plain values are read")
        return super().find_class(module, name)


def _read_pickle(path: Path) -> Mapping[Any, Any]:
    with path.open("rb") as file:
        content: Mapping[Any, Any] = _PlainUnpickler(file).load()
    return content
