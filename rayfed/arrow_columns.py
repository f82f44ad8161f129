"""Columns of Arrow, made and read through their buffers.

Arrow's own conversions import pandas when they are first used, in every process, which takes longer than the
rest of Arrow.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa

KINDS = {bool: "bool", int: "int64", float: "double", str: "string"}
"""Types of columns by the types of their values."""

LARGEST = 2**31 - 1
"""Most bytes of all texts in one column."""


def column(values: Any, kind: str = "") -> pa.Array:
    """A column of numbers, truth values or texts, some of which may be missing.

    Args:
        values: A list or an array; None: there is no value.
        kind: Arrow's name of the type; empty: that of the values, as Arrow finds it.
    """
    import pyarrow as pa

    flags_as_numbers = "b" if kind not in ("", "bool") else ""
    if isinstance(values, np.ndarray) and values.dtype.kind in f"iuf{flags_as_numbers}":
        numbers = np.ascontiguousarray(values, np.dtype(kind) if kind else None)
        own = pa.type_for_alias(numbers.dtype.name)
        return pa.Array.from_buffers(own, len(numbers), [None, pa.py_buffer(numbers)])
    values = list(values)
    kind = kind or _kind_of(values)
    if kind == "null":
        return pa.nulls(len(values))
    if not kind:
        return pa.array(values)
    there = np.fromiter((value is not None for value in values), bool, len(values))
    if kind == "string":
        parts = [b"" if value is None else str(value).encode() for value in values]
        ends = np.fromiter(itertools.accumulate(map(len, parts), initial=0), np.int64, len(parts) + 1)
        if ends[-1] > LARGEST:
            return pa.array(values, kind)
        buffers = [pa.py_buffer(ends.astype(np.int32)), pa.py_buffer(b"".join(parts))]
    else:
        numbers = np.array([0 if value is None else value for value in values], _numpy(kind))
        buffers = [pa.py_buffer(_bits(numbers) if kind == "bool" else numbers)]
    missing = None if there.all() else pa.py_buffer(_bits(there))
    return pa.Array.from_buffers(pa.type_for_alias(kind), len(values), [missing, *buffers])


def _kind_of(values: Sequence[Any]) -> str:
    """Arrow's name of the type of values; empty: they are none of these, or of several types."""
    kinds = {type(value) for value in values} - {type(None)}
    if kinds == {int, float}:
        return "double"
    if len(kinds) > 1:
        return ""
    return KINDS.get(kinds.pop(), "") if kinds else "null"


def _numpy(kind: str) -> Any:
    return np.float64 if kind == "double" else np.dtype(kind)


def _bits(flags: NDArray[Any]) -> NDArray[np.uint8]:
    return np.packbits(flags.astype(bool), bitorder="little")


def column_of_few(names: Sequence[str], places: NDArray[Any]) -> pa.Array:
    """A column of texts, each of which is one of few.

    Args:
        places: Place in `names` of the text in each row.
    """
    import pyarrow as pa

    codes = column(np.asarray(places, np.int32))
    return pa.DictionaryArray.from_arrays(codes, column(names, "string")).cast(pa.string())


def table(columns: Mapping[str, Any]) -> pa.Table:
    """A table of columns, or of values as of `column`, by name."""
    import pyarrow as pa

    made = [each if isinstance(each, pa.Array) else column(each) for each in columns.values()]
    return pa.Table.from_arrays(made, names=list(columns))


def numbers(values: pa.Array) -> NDArray[Any]:
    """The numbers of a column without missing ones, as a view of its memory. Args: values: the column."""
    kind = np.dtype(values.type.to_pandas_dtype())
    buffer = values.buffers()[1]
    whole = np.frombuffer(buffer, kind) if buffer is not None and buffer.size else np.empty(0, kind)
    return whole[values.offset : values.offset + len(values)]
