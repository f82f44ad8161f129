"""Reads the files of a run folder, which anybody may have changed: the right kind of content or an error."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rayfed.errors import ConfigError, one_line

if TYPE_CHECKING:
    import pyarrow as pa

    from rayfed.types import Params

Content = TypeVar("Content")


class DamagedError(ConfigError):
    """A file of a run is missing or is not what was written; the message names it in one line."""


@contextmanager
def reading(path: Path, what: str = "") -> Iterator[None]:
    """Turn whatever damaged content raises while it is read into one DamagedError.

    Args:
        path: The file or folder that is read.
        what: Said instead of "PATH cannot be read".

    Raises:
        DamagedError: Something in it is missing, cannot be decoded, or has another type than was written.
    """
    import pyarrow as pa
    import yaml
    from safetensors import SafetensorError

    try:
        yield
    except DamagedError as err:
        if what:
            raise DamagedError(f"{what}: {err}") from err
        raise
    except ConfigError:
        raise
    except OSError as err:
        reason = err.strerror or one_line(err)
        raise DamagedError(f"{what or f'{path} cannot be read'}: {reason}") from err
    except RecursionError as err:
        raise DamagedError(f"{what or f'{path} cannot be read'}: it is nested too deeply") from err
    except (
        *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, EOFError),
        *(zlib.error, yaml.YAMLError, pa.ArrowException, SafetensorError),
    ) as err:
        reason = one_line(err)[:300]
        raise DamagedError(f"{what or f'{path} cannot be read'}: {type(err).__name__}: {reason}") from err


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    """A file for reading; DamagedError where there is none, also for a folder, a pipe or a device."""
    with reading(path):
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(number, "rb") as file:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise ValueError("it is not a file")
            yield file


def read_bytes(path: Path) -> bytes:
    """The content of a file."""
    with _opened(path) as file:
        return file.read()


def digest_of(path: Path) -> str:
    """The sha256 of a file, which need not fit into memory."""
    with _opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path, kind: type[Content]) -> Content:
    """The JSON value of a file, which must be of this type."""
    return _parsed(path, read_bytes(path), kind)


def read_packed(path: Path, kind: type[Content]) -> Content:
    """The same of a file that gzip packed."""
    with reading(path):
        data = gzip.decompress(read_bytes(path))
    return _parsed(path, data, kind)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """JSON objects, one a line."""
    return [_parsed(path, line, dict) for line in read_bytes(path).splitlines()]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The lines of result.json: rounds in order, counted from 1."""
    path = folder / "result.json"
    rows = read_lines(path)
    if [row.get("round") for row in rows] != list(range(1, len(rows) + 1)):
        raise DamagedError(f"{path} cannot be read: its lines are not the rounds of a run")
    return rows


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys of a YAML file."""
    import yaml

    with reading(path):
        tree = yaml.safe_load(read_bytes(path).decode())
        if not isinstance(tree, dict):
            raise TypeError("it holds no keys")
    return tree


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """A table, or these columns of it."""
    import pyarrow.parquet as pq

    with reading(path):
        return pq.read_table(path, columns=columns)


def read_table(folder: Path, table: str) -> Sequence[Mapping[str, Any]]:
    """Rows of `<table>.parquet` of a run, or none where there is no such table."""
    path = folder / f"{table}.parquet"
    rows: Sequence[Mapping[str, Any]] = read_parquet(path).to_pylist() if path.exists() else []
    return rows


def read_tensors(path: Path) -> Params:
    """The tensors of a safetensors file."""
    from safetensors.torch import load_file

    with reading(path):
        return dict(load_file(path))


def _parsed(path: Path, data: bytes, kind: type[Content]) -> Content:
    with reading(path):
        value = json.loads(data)
        if not isinstance(value, kind):
            raise TypeError(f"it holds a {type(value).__name__} where a {kind.__name__} belongs")
        return value
