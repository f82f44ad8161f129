"""Reads the files of a run folder, which anybody may have changed: returns the right type or raises an error.

YAML and JSON are read by `rayfed.user_files`, with its limits.

Names in the folder of a run.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rayfed.errors import ConfigError, one_line
from rayfed.objective import register_metric
from rayfed.user_files import DocumentError, parse_json, parse_yaml

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from rayfed.types import Params


CELLS = "cells"
"""The folders of the cells of a study are in here."""

WITHOUT = "without.json"
"""File with the scores of the final model whose adapters, or whose head, are put back."""

ROWS = "rounds.jsonl"
"""One JSON object for each finished round."""

STUDY = "study.json"
"""The cells of a study, in its folder: their coordinates, folders and digests."""

SWEEP = "sweep.yaml"
"""The arguments of `rayfed sweep`, in the folder of its study."""

SCORE = "score"
"""Key of environment.json for the metric of a run, as of `rayfed.objective.score_facts`."""

SENT = "sent"
"""Model of the rows of clients.parquet with values that clients sent, and not scores of a model."""

OWN_TENSORS = "own_tensors"
"""Entry of environment.json: how many of the scored clients kept tensors in the run whose model is scored."""


Content = TypeVar("Content")


class DamagedError(ConfigError):
    """A file of a run is missing or was changed; the message names it in one line."""


@contextmanager
def reading(path: Path, what: str = "") -> Iterator[None]:
    """Turn every error that reading damaged content can raise into a DamagedError.

    Args:
        path: The file or folder that is read.
        what: Begins the message instead of "PATH cannot be read".

    Raises:
        DamagedError: Something in it is missing, cannot be decoded, or has another type than was written.
    """
    import pyarrow as pa
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
    except DocumentError as err:
        raise DamagedError(f"{what or f'{path} cannot be read'}: {err}") from err
    except (
        *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, EOFError),
        *(zlib.error, pa.ArrowException, SafetensorError),
    ) as err:
        reason = one_line(err)[:300]
        raise DamagedError(f"{what or f'{path} cannot be read'}: {type(err).__name__}: {reason}") from err


def open_file(path: Path) -> io.BufferedReader:
    """Open a regular file for reading.

    Raises:
        OSError: It cannot be opened or is something else, such as a pipe, which would wait for ever.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return os.fdopen(number, "rb")


@contextmanager
def _open(path: Path) -> Iterator[io.BufferedReader]:
    """A file, opened for reading; what cannot be read in the block raises DamagedError, as of `reading`."""
    with reading(path), open_file(path) as file:
        yield file


def read_bytes(path: Path) -> bytes:
    """The content of a file."""
    with _open(path) as file:
        return file.read()


def digest_of(path: Path) -> str:
    """The SHA-256 digest of a file, which may be larger than memory."""
    with _open(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path, kind: type[Content]) -> Content:
    """The JSON value of a file; raises DamagedError unless it has the type `kind`."""
    return _parse(path, read_bytes(path), kind)


def read_packed(path: Path, kind: type[Content]) -> Content:
    """The JSON value of a file that is compressed with gzip; raises DamagedError unless it is a `kind`."""
    with reading(path):
        data = gzip.decompress(read_bytes(path))
    return _parse(path, data, kind)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file that has one per line.

    Text after the last line break is left out: a process is writing it, or ended while it did.
    """
    data = read_bytes(path)
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    return [_parse(path, line, dict, f"line {number}") for number, line in enumerate(lines, start=1)]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of rounds.jsonl, one per round, checked to be rounds 1, 2, 3 and so on."""
    path = folder / ROWS
    again = "; python -m rayfed.resume writes it anew from the history (own objects: Experiment.resume)"
    advice = again if has_checkpoint(folder) else ""
    try:
        rows = read_lines(path)
    except DamagedError as err:
        raise DamagedError(f"{err}{advice}") from err
    if [row.get("round") for row in rows] != list(range(1, len(rows) + 1)):
        raise DamagedError(f"{path} cannot be read: its lines are not the rounds of a run{advice}")
    _learn_metric(folder)
    return rows


def _learn_metric(folder: Path) -> None:
    """Let this process know the metric of a run whose task is one of a user."""
    file = folder / "environment.json"
    if file.exists():
        with suppress(DamagedError), reading(file):
            if score := read_json(file, dict).get(SCORE):
                register_metric(score)


def has_checkpoint(folder: Path) -> bool:
    """Whether the run in a folder can be continued, as far as the names of its files say."""
    return any((folder / "checkpoints").glob("round-*"))


def rows_so_far(folder: Path) -> list[dict[str, Any]]:
    """The rows of all finished rounds; none before the first one is finished.

    Raises:
        DamagedError: rounds.jsonl is damaged.
    """
    return read_rows(folder) if os.path.lexists(folder / ROWS) else []


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys of a YAML file."""
    with reading(path):
        tree = parse_yaml(read_bytes(path).decode())
        if not isinstance(tree, dict):
            raise TypeError("it holds no keys")
    return tree


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The table of a Parquet file, or only some of its columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _open(path) as file, pq.ParquetFile(file) as parquet:  # its `read_table` imports pandas
        names = parquet.schema_arrow.names
        if missing := [name for name in columns or () if name not in names]:
            raise pa.ArrowInvalid(f"there is no column {missing[0]!r} among {', '.join(names)}")
        return parquet.read(columns)


def read_footer(path: Path) -> pq.FileMetaData:
    """The metadata of a Parquet file: its columns, its number of rows, and what its writer added."""
    import pyarrow.parquet as pq

    with _open(path) as file:
        return pq.read_metadata(file)


def read_tensors(path: Path) -> Params:
    """The tensors of a safetensors file."""
    from safetensors.torch import load_file

    with _open(path):  # it may be no file
        return dict(load_file(path))


def _parse(path: Path, data: bytes, kind: type[Content], where: str = "") -> Content:
    with reading(path, where and f"{path} cannot be read: {where}"):
        value = parse_json(data)
        if not isinstance(value, kind):
            raise TypeError(f"it holds a {type(value).__name__} where a {kind.__name__} belongs")
        return value
