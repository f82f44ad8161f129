"""Arrays made of what a user handed over: of torch, NumPy, pandas or lists, with whatever they hold.

Every value is looked at. What cannot be stored, and what is missing (None, NaN in objects, masked values), is
one line that names the place and the example.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rayfed.data.listing import SUFFIXES, is_missing
from rayfed.errors import DataError, one_line, shown

Array: TypeAlias = NDArray[Any]

ADVICE = "give numbers of one shape, or paths or bytes of image files"

SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic, Path, Decimal)

KINDS = {
    "c": "complex numbers cannot be stored; give their parts as two channels",
    "M": "dates cannot be stored; give numbers, such as days since the first one",
    "m": "spans of time cannot be stored; give numbers, such as x / np.timedelta64(1, 's')",
    "V": "an array with named fields cannot be stored; give its columns side by side, shape (N, K)",
}
"""Why arrays of these kinds (`numpy.dtype.kind`) are refused."""


def numbers_or_images(value: Any, place: str) -> Array:
    """Inputs of a user, as they are stored: numbers, shape (N, ...), or N paths or bytes of image files.

    Args:
        value: Of torch, NumPy, pandas or lists.
        place: What names it in messages.

    Raises:
        DataError: It is something else, has missing values, or examples of different shapes.
    """
    array = stored(value, place)
    if array.dtype.kind == "U" and all(each.lower().endswith(SUFFIXES) for each in array.flat[:1]):
        array = array.astype(object)
    if array.dtype.kind == "U":
        example = shown(str(array.flat[0])) if array.size else "''"
        if array.size and is_number(str(array.flat[0])):
            raise DataError(
                f"{place}: the inputs are numbers as text, such as {example}; make them numbers, e.g. "
                "x.astype(float)"
            )
        raise DataError(
            f"{place}: the inputs are texts, such as {example}; {ADVICE}; texts are read from files "
            "(data=csv, jsonl, parquet) by models of texts"
        )
    return array


def is_number(text: str) -> bool:
    """Whether a text says a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def stored(value: Any, place: str) -> Array:
    """An array of a user in the type in which it is stored; `object` for paths and bytes of image files.

    Raises:
        DataError: As of `numbers_or_images`.
    """
    array = np.asarray(unpacked(value, place))
    if array.dtype.kind == "T":
        array = array.astype(object)
    array = _of_objects(array, place)
    if array.dtype.kind in KINDS:
        raise DataError(f"{place}: {KINDS[array.dtype.kind]}")
    if array.dtype.kind == "f" and array.dtype != np.float32:
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused with its row
            array = array.astype(np.float32)
    if array.dtype.kind == "S":
        array = _decoded(array, place)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array if array.ndim else array[None]


def texts_of_bytes(array: Array, place: str) -> Array:
    """Labels as they are stored, those in bytes as text. Args: array: of `stored`; place: as there."""
    if array.size and array.dtype == object and all(isinstance(each, bytes) for each in array.flat):
        return _decoded(np.array(array.tolist()), place)
    return array


def is_arrow(value: Any) -> bool:
    """Whether a value is an array of Arrow, which has no shape."""
    return type(value).__module__.partition(".")[0] == "pyarrow" and hasattr(value, "to_pylist")


def _decoded(array: Array, place: str) -> Array:
    try:
        return np.char.decode(array, "utf-8")
    except UnicodeDecodeError as err:
        raise DataError(f"{place}: a text is not UTF-8 ({one_line(err)}); give it as str") from err


def unpacked(value: Any, place: str, row: int | None = None) -> Any:
    """An array of NumPy for any container that holds numbers, or the scalar itself.

    Args:
        value: The container.
        place: What names it in messages.
        row: The example that it is a part of; None: it has all examples.

    Raises:
        DataError: It cannot be read, or has masked values.
    """
    if isinstance(value, SCALARS):
        return value
    library = type(value).__module__.partition(".")[0]
    if hasattr(value, "detach"):
        return _of_torch(value, place, row)
    if isinstance(value, np.ma.MaskedArray):
        return _unmasked(value.data, ~np.ma.getmaskarray(value), place, row)
    if library == "pandas":
        return _of_pandas(value, place)
    if is_arrow(value):
        return _of_list(value.to_pylist(), place, row)
    if library == "scipy" and hasattr(value, "toarray"):  # a sparse matrix
        return np.asarray(value.toarray())
    if library == "PIL" and getattr(value, "mode", "") in ("P", "PA"):  # numbers of colours, else
        return np.asarray(value.convert("RGB"))
    if isinstance(value, list | tuple):
        return _of_list(value, place, row)
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as err:
        raise DataError(f"{place}: {type(value).__name__} is no array ({one_line(err)}); {ADVICE}") from err


def _of_list(values: Sequence[Any], place: str, row: int | None = None) -> Array:
    """The array of a list. Raises DataError for parts of different shapes."""
    if values and set(map(type, values)) <= {int, float}:
        with suppress(OverflowError):  # of whole numbers that are too large, which are named below
            return np.asarray(values)
    parts = [unpacked(each, place, number if row is None else row) for number, each in enumerate(values)]
    are_arrays = [isinstance(part, np.ndarray) for part in parts]
    numeric = all(isinstance(part, bool | int | float | complex | np.number | np.bool_) for part in parts)
    try:
        if parts and all(are_arrays):
            if any(part.dtype.kind in "OU" for part in parts):  # one text among numbers stays visible
                parts = [part.astype(object) for part in parts]
            return np.stack(parts)
        if not any(are_arrays):
            return np.asarray(parts) if numeric else _objects(parts)
    except (ValueError, OverflowError) as err:
        raise DataError(_different(place, one_line(err))) from err
    raise DataError(_different(place, "some are one number"))


def _different(place: str, why: str) -> str:
    return f"{place}: the examples have different shapes ({why}); pad or resize them to one shape"


def _objects(values: Sequence[Any]) -> Array:
    """Values one by one, shape (N,), whatever they are."""
    out = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        out[row] = value
    return out


def _of_torch(value: Any, place: str, row: int | None = None) -> Array:
    """The array of a tensor. Raises DataError for masked values and types that NumPy does not have."""
    try:
        value = value.detach().cpu()
        if hasattr(value, "get_mask"):
            mask = value.get_mask()
            return _unmasked(_of_torch(value.get_data(), place), _of_torch(mask, place), place, row)
        torch = sys.modules["torch"]
        if value.is_nested:
            value = torch.stack(value.unbind())
        if value.layout != torch.strided:
            value = value.to_dense()
        if value.is_quantized:
            value = value.dequantize()
        if value.is_floating_point() and value.dtype not in (torch.float16, torch.float32, torch.float64):
            value = value.float()
        return np.asarray(value.resolve_conj().resolve_neg().numpy())
    except (TypeError, RuntimeError, NotImplementedError) as err:
        raise DataError(f"{place}: a tensor cannot be read ({one_line(err)}); {ADVICE}") from err


def _unmasked(values: Array, valid: Array, place: str, row: int | None) -> Array:
    """The values of a masked array without masked values.

    Args:
        values: The values.
        valid: Where there is one, of the same shape.
        place: As of `unpacked`.
        row: As of `unpacked`.

    Raises:
        DataError: Some values are masked.
    """
    if not valid.all():
        rows = [row] if row is not None else np.flatnonzero(~valid.reshape(len(valid), -1).all(axis=1))
        raise DataError(
            f"{place}: example {rows[0]} has masked values; fill them, or leave out such examples"
            + (f" ({len(rows)})" if row is None else "")
        )
    return np.asarray(values)


def _of_pandas(value: Any, place: str) -> Any:
    """The array of a column, an index or a table of pandas; `_of_objects` finds missing values."""
    if hasattr(value, "columns"):
        parts = [_of_pandas(value.iloc[:, number], place) for number in range(value.shape[1])]
        return np.stack(parts, axis=1) if parts else np.empty((len(value), 0), np.float32)
    if getattr(value, "ndim", 1) == 0 or not hasattr(value, "dtype"):
        return value  # NA, NaT and other scalars
    if value.dtype.kind in "biuf" and isinstance(value.dtype, np.dtype):
        return np.asarray(value)
    return _objects(list(value))


def _of_objects(array: Array, place: str) -> Array:
    """The array of values that NumPy holds one by one, by what they all are; others as they are.

    Raises:
        DataError: A value is missing, or they are of several kinds.
    """
    if array.dtype != object:
        return array
    values = list(array.flat)
    _check_there(values, array, place)
    if values and not any(isinstance(value, SCALARS) for value in values):
        parts = _of_list(values, place)
        if parts.dtype != object or parts.ndim > 1:
            return _of_objects(parts.reshape(*array.shape, *parts.shape[1:]), place)
    kind = _only_kind(values, place)
    ended = [row for row, each in enumerate(values) if kind == "text" and each.endswith("\0")]
    if ended:  # which NumPy would drop
        odd = ended[0]
        raise DataError(
            f"{place}: example {odd} ends with the character NUL ({shown(values[odd])}); remove it"
        )
    if kind in ("text", "number"):
        found = np.array(values, dtype=np.str_) if kind == "text" else _numbers(values, place)
        return found.reshape(array.shape)
    if kind != "file":
        raise DataError(f"{place}: the examples are of type {type(values[0]).__name__}; {ADVICE}")
    return array


def _only_kind(values: Sequence[Any], place: str) -> str:
    """The kind of all values, in a word; of none of them, `number`. Raises DataError where they differ."""
    kinds = [_kind(value) for value in values]
    odd = next((row for row, kind in enumerate(kinds) if kind != kinds[0]), None)
    if odd is not None:
        raise DataError(
            f"{place}: example {odd} is {shown(values[odd])}, a {kinds[odd]}, and example 0 "
            f"{shown(values[0])}, a {kinds[0]}; {ADVICE}"
        )
    return kinds[0] if kinds else "number"


def _check_there(values: Sequence[Any], array: Array, place: str) -> None:
    """Raise DataError where a value is missing. Args: values: those of the array in one row."""
    number = next((number for number, value in enumerate(values) if is_missing(value)), None)
    if number is not None:
        row = number // max(1, array.size // len(array)) if array.ndim else 0
        raise DataError(
            f"{place}: example {row} has no value ({shown(values[number])}); fill or leave out such examples"
        )


def _kind(value: Any) -> str:
    """The kind of a value, in a word."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, bytes | Path):
        return "file"
    return "number" if isinstance(value, Real | Decimal | np.bool_) else type(value).__name__


def _numbers(values: Sequence[Any], place: str) -> Array:
    """Numbers of Python: bool, int64 or float64, whichever holds them all."""
    if all(isinstance(value, bool | np.bool_) for value in values):
        return np.array(values, dtype=np.bool_)
    try:
        if all(isinstance(value, int | np.integer | np.bool_) for value in values):
            return np.array(values, dtype=np.int64)
        return np.array([float(value) for value in values])
    except OverflowError as err:
        raise DataError(f"{place}: a number is too large ({one_line(err)}); give smaller ones") from err
