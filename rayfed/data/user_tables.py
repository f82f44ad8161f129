"""Columns of a user's table, of pandas, Arrow or the library `datasets`, as inputs, targets and clients.

Nothing of a table is dropped or renumbered without a word: a row without a client, a split or a domain is
refused, and so is a column that can be no input; which columns are used is said in the header of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayfed.data.listing import SUFFIXES, is_missing, name_in_text, named_in_one_way
from rayfed.data.user_values import Array, is_arrow, is_number, numbers_or_images, stored, texts_of_bytes
from rayfed.errors import DataError, one_line, shown, unknown
from rayfed.objective import REGRESSION

log = logging.getLogger(__name__)

USUAL = {
    "client": ("client", "client_id", "user", "writer_id", "owner"),
    "target": ("target", "label", "labels", "y", "class"),
    "input": ("input", "image", "img", "path", "file", "x", "pixel_values"),
    "split": ("split",),
    "domain": ("domain",),
}
"""Names by which the columns of a table are found where `columns` says nothing. An input is found by its name
only where it holds arrays or images; otherwise all columns of numbers are inputs."""

KEYS = ("client", "split", "domain")
"""Parts of a table that say whose a row is, in the order in which rows are grouped."""

LISTS_OF_CLASSES = "lists of classes"
"""Attribute of a data frame: the columns that hold a list of numbers of classes in each row."""

MOST_NAMED = 10
"""Columns that are named in the header of a run."""


@dataclass(frozen=True)
class Order:
    """The classes in the order of their source.

    Attributes:
        names: Class i is output i.
        matters: Whether the source says that they are ordered, so that no other order may take its place.
    """

    names: tuple[str, ...]
    matters: bool

    def __str__(self) -> str:
        return ", ".join(self.names)


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnRows:
    """The rows of one client, split and domain, each None where the table has no such column.

    Attributes:
        client, split, domain: Their names.
        rows: Numbers of the rows, from 0.
    """

    client: str | None
    split: str | None
    domain: str | None
    rows: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Columns:
    """The columns of a table of N rows.

    Attributes:
        inputs: Shape (N, ...), or N paths or bytes of image files.
        targets: Shape (N, ...).
        order: The classes in the order of the source; None: it has none.
        keys: Columns of `client`, `split` and `domain`, a data frame with those that there are.
        named: Name of the column of each key.
        said: Which columns are used, and which are not.
    """

    inputs: Array
    targets: Array
    order: Order | None
    keys: Any
    named: Mapping[str, str]
    said: str

    def groups(self, splits: Sequence[str]) -> Iterator[OwnRows]:
        """The groups of rows, in the order of the values of the keys.

        Args:
            splits: Names that a split may have.

        Raises:
            DataError: A split has another name, or two clients have one name.
        """
        there = [part for part in KEYS if part in self.named]
        every = np.arange(len(self.targets))
        if not there:
            yield OwnRows(client=None, split=None, domain=None, rows=every)
            return
        names = [self.named[part] for part in there]
        for part, name in self.named.items():
            named_in_one_way(list(self.keys[name]), part, name)
        try:
            grouped = self.keys.groupby(names, sort=True, observed=True).indices
        except TypeError as err:
            raise DataError(
                f"data: the values of {' and '.join(map(repr, names))} cannot be sorted ({one_line(err)}); "
                "make them texts or numbers"
            ) from err
        for key, rows in grouped.items():
            own = dict(zip(there, key if isinstance(key, tuple) else (key,), strict=True))
            texts = {part: name_in_text(own[part]) if part in own else None for part in KEYS}
            group = OwnRows(**texts, rows=rows)
            if group.split is not None and group.split not in splits:
                whose = f"data: the rows of client {group.client!r}" if group.client else "data"
                raise DataError(unknown(f"{whose}: {self.named['split']}", group.split, splits))
            yield group


def table_of(value: Any) -> Any:
    """A table of pandas, Arrow or `datasets`, or a partition of such, as a data frame; None: it is none."""
    if callable(getattr(value, "load_partition", None)):
        return _of_partitions(value)
    module = type(value).__module__.partition(".")[0]
    if module == "pandas" and hasattr(value, "columns"):
        return value
    if module == "pyarrow" and hasattr(value, "to_pandas"):
        if len(set(value.schema.names)) < len(value.schema.names):
            _check_names(value.schema.names)
        return value.to_pandas()
    if module == "datasets" and hasattr(value, "to_pandas"):
        return _of_datasets(value)
    return None


def _of_partitions(value: Any) -> Any:
    """The tables of a partition, such as one of flwr-datasets, as one with the columns `client` and `split`.

    It has `load_partition(i)` and `num_partitions`, or is a `FederatedDataset`, with `partitioners` by split.

    Raises:
        DataError: A part is no table, or has a column of that name already.
    """
    import pandas as pd

    splits = getattr(value, "partitioners", None)
    loads: list[tuple[dict[str, str], Callable[[int], Any], Any]]
    if isinstance(splits, Mapping):
        loads = [
            ({"split": split}, partial(value.load_partition, split=split), part)
            for split, part in splits.items()
        ]
    else:
        loads = [({}, value.load_partition, value)]
    frames = []
    for named, load, part in loads:
        first = load(0)  # which gives the partitioner of a FederatedDataset its data
        count = int(part.num_partitions)
        for number in range(count):
            table = table_of(first if number == 0 else load(number))
            if table is None:
                raise DataError(f"data: load_partition({number}) gave {shown(first)}, which is no table")
            own = {"client": f"{number:0{len(str(count - 1))}d}", **named}
            if twice := next((name for name in own if name in table.columns), None):
                raise DataError(f"data: the tables of the partition have a column {twice!r}; rename it there")
            frames.append(table.assign(**own))
    whole = pd.concat(frames, ignore_index=True)
    whole.attrs = dict(frames[0].attrs)
    return whole


def _of_datasets(value: Any) -> Any:
    """A set of the library `datasets` as a data frame, with images as bytes or paths and names of classes."""
    import pandas as pd

    frame = value.with_format(None).to_pandas()
    several = (n for n, f in value.features.items() if hasattr(getattr(f, "feature", None), "int2str"))
    frame.attrs[LISTS_OF_CLASSES] = list(several)
    for name, feature in value.features.items():
        if hasattr(feature, "int2str"):
            codes = frame[name].fillna(-1).astype(np.int64)
            frame[name] = pd.Categorical.from_codes(codes, categories=feature.names, ordered=True)
        elif type(feature).__name__ == "Image":
            frame[name] = pd.Series([_image(each) for each in frame[name]], dtype=object, index=frame.index)
    return frame


def _image(value: Any) -> Any:
    """The bytes or the path of an image as `datasets` stores it; None: there is no image."""
    return (value.get("bytes") or value.get("path")) if isinstance(value, Mapping) else value


def order_of(value: Any) -> Order | None:
    """The order of the classes that a column of pandas has; None: it has none, or they are whole numbers.

    Whole numbers keep their number as output, whatever their order is.
    """
    if is_arrow(value) and hasattr(value.type, "index_type"):
        value = value.to_pandas()
    kind: Any = getattr(value, "dtype", None)
    names = tuple(getattr(kind, "categories", ()))
    if not names or not all(isinstance(name, str) for name in names):
        return None
    return Order(names, bool(kind.ordered))


def _check_names(names: Sequence[Any]) -> None:
    twice = next((name for place, name in enumerate(names) if name in list(names)[:place]), None)
    if twice is not None:
        raise DataError(
            f"data: the table has two columns {str(twice)!r}; rename one of them, or leave it out"
        )


def read_columns(frame: Any, columns: Mapping[str, Any], task: str | None = None) -> Columns:
    """The inputs, targets and clients of a table.

    Args:
        frame: A data frame of pandas, which is not changed.
        columns: Names of the columns: `client`, `input`, `target`, `split` and `domain`.
        task: The task, where it is known already; None: it follows from the targets.

    Raises:
        DataError: A column does not exist, is there twice, or holds what it cannot; names column and row.
    """
    if not isinstance(columns, Mapping):
        raise DataError(
            f"columns: {shown(columns)} is no dict; give the names of columns, such as {{'target': NAME}}"
        )
    names = list(frame.columns)
    chosen = _chosen(frame, columns)
    target: Any = chosen["target"]
    if not len(frame):
        raise DataError("data: the table has no rows; give one or more")
    named = {part: chosen[part] for part in KEYS if chosen[part] is not None}
    for part, name in named.items():
        _check_complete(frame, name, part)
    targets_named = _several(target, names) or [target]
    free = [name for name in names if name not in (*named.values(), *targets_named)]
    used, inputs = _inputs(frame, columns.get("input"), free)
    if shared := next((name for name in used if name in targets_named), None):
        raise DataError(f"columns.input: {shared!r} is the target; leave it out of the inputs")
    targets, order = _targets(frame, target, task)
    return Columns(
        inputs=inputs,
        targets=targets,
        order=order,
        keys=frame[list(named.values())].reset_index(drop=True),
        named=named,
        said=_said(used, [name for name in free if name not in used], targets_named),
    )


def _chosen(frame: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    """The column of each part but `input`, None where there is none; arguments as of `read_columns`."""
    names = list(frame.columns)
    _check_names(names)
    for part, wanted in columns.items():
        if part not in USUAL:
            raise DataError(unknown("columns", part, USUAL))
        several = _several(wanted, names)
        if several is not None and part in KEYS:
            raise DataError(f"columns.{part}: {shown(wanted)} are several columns; give the name of one")
        for column in [wanted] if several is None else several:
            if column not in names:
                kinds = "; names are compared by their type, too" if str(column) in map(str, names) else ""
                raise DataError(unknown(f"columns.{part}", column, map(str, names)) + kinds)
    for part in ("client", "target"):
        there = [name for name in USUAL[part] if name in names and name != "y"]  # y can be a coordinate
        if part not in columns and len(there) > 1:
            raise DataError(
                f"columns.{part}: the table has the columns {' and '.join(there)}; say which is the {part}: "
                f"columns={{{part!r}: {there[0]!r}}}"
            )
    chosen = {
        part: columns[part] if part in columns else next((n for n in usual if n in names), None)
        for part, usual in USUAL.items()
        if part != "input"
    }
    usual = [name for part, column in chosen.items() if column is None for name in USUAL[part]]
    if hidden := next((name for name in frame.index.names if name in usual), None):
        raise DataError(f"data: {hidden!r} is the index of the table, no column; give frame.reset_index()")
    if chosen["target"] is None:
        raise DataError(
            f"columns.target: the table has the columns {', '.join(map(str, names))}; say which is the "
            "target: columns={'target': NAME}"
        )
    return chosen


def _several(wanted: Any, names: Sequence[Any]) -> list[Any] | None:
    """The columns where a list of them is named; None: one is, whose name may be a tuple."""
    is_list = isinstance(wanted, list | tuple) and not (isinstance(wanted, tuple) and wanted in names)
    return list(wanted) if is_list else None


def _said(used: Sequence[Any], others: Sequence[Any], targets: Sequence[Any]) -> str:
    """The sentence of the header about the columns of a table."""
    more = f"; not used: {_few(others)}" if others else ""
    return f"columns of the table: inputs {_few(used)}; target {_few(targets)}{more}"


def _few(names: Sequence[Any]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(map(str, names[:MOST_NAMED])) + more


def _row(frame: Any, row: int) -> str:
    """Words for a row, from 0: its number among all rows, and its name in the index where that is another."""
    label = frame.index[row]
    label = label.item() if isinstance(label, np.generic) else label
    plain = isinstance(label, int) and label == row
    return f"row {row + 1} of the table" + ("" if plain else f" (index {shown(label)})")


def _check_complete(frame: Any, name: str, what: str = "value", place: str = "data") -> None:
    """Check that a column has a value in every row.

    Args:
        what: What a row without a value lacks, for the message.
        place: What names the table in messages.

    Raises:
        DataError: A row has none; names the first one.
    """
    missing = [row for row, value in enumerate(frame[name]) if is_missing(value)]
    if missing:
        raise DataError(
            f"{place}: {_row(frame, missing[0])} has no {what} in column {str(name)!r}; fill or leave out "
            f"{len(missing)} such rows"
        )


def inputs_of(value: Any, place: str) -> Array:
    """The inputs of a client: the columns of a table of pandas, or any other form of an array.

    Args:
        value: The inputs.
        place: What names them in messages.

    Raises:
        DataError: They are something else, or have missing values.
    """
    if type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "columns"):
        _check_names(list(value.columns))
        return _inputs(value, None, list(value.columns), place)[1]
    return numbers_or_images(value, place)


def _inputs(frame: Any, wanted: Any, free: Sequence[Any], place: str = "data") -> tuple[list[Any], Array]:
    """The columns that are inputs, and what they hold.

    Args:
        wanted: Those that the user names; None: none.
        free: All that may be inputs.
        place: What names the table in messages.
    """
    kinds = {name: kind_of(frame[name]) for name in free}
    if wanted is None:
        likely = [name for name in USUAL["input"] if kinds.get(name, "numbers") in ("arrays", "images")]
        likely = likely or [name for name in free if kinds[name] in ("arrays", "images")][: len(free)]
        if likely and (likely[0] in USUAL["input"] or len(free) == 1):
            wanted = likely[0]
    if wanted is not None and _several(wanted, list(frame.columns)) is None:
        _check_complete(frame, wanted, "input", place)
        return [wanted], _one(frame, wanted, place)
    used = list(free if wanted is None else wanted)
    if not used:
        raise DataError(
            f"{place}: the table has no column left that could be an input; add columns of numbers"
        )
    for name in used:
        if (kind := kind_of(frame[name])) != "numbers":
            raise DataError(f"{place}: column {str(name)!r} holds {_in_words(frame[name], kind)}")
        _check_complete(frame, name, "value", place)
    parts = [_in_floats(_number_column(frame, name), name, place) for name in used]
    return used, np.stack(parts, axis=1)


MOST_LOOKED_AT = 10_000
"""Rows of a column of numbers of which different values are counted."""


def _in_floats(values: Array, name: Any, place: str) -> Array:
    """A column of numbers as float32; a warning where most of its different values become equal by that.

    Args:
        values: The numbers.
        name: Name of the column.
        place: What names the table in messages.
    """
    floats = np.asarray(values, dtype=np.float32)
    first, rounded = (len(np.unique(each[:MOST_LOOKED_AT])) for each in (values, floats))
    if 2 * rounded < first:
        log.warning(
            "%s: column %r has %d different values in its first %d rows, and %d as float32; subtract its "
            "smallest one, or divide it into several columns",
            *(place, str(name), first, len(values[:MOST_LOOKED_AT]), rounded),
        )
    return floats


ADVICE = {
    "text": "make it numbers, such as with pandas.get_dummies, or leave it out",
    "numbers as text": "make them numbers, such as with pandas.to_numeric",
    "dates": "make them numbers, such as days since the first one, or leave the column out",
    "arrays": "name the one that is the input: columns={'input': NAME}",
    "images": "name the one that is the input: columns={'input': NAME}",
}
"""Advice about a column that is no column of numbers, by its kind."""


def _in_words(column: Any, kind: str) -> str:
    example = next((value for value in column if not is_missing(value)), None)
    advice = ADVICE.get(kind, "give numbers of one shape, or leave it out")
    return f"{kind}, such as {shown(example)}; {advice}"


def kind_of(column: Any) -> str:
    """The content of a column in words, such as `numbers`, `text`, `dates`, `arrays` or `images`."""
    from pandas.api import types

    dtype = column.dtype
    if types.is_datetime64_any_dtype(dtype) or dtype.kind in "mM":
        return "dates"
    if types.is_complex_dtype(dtype):
        return "complex numbers"
    if types.is_numeric_dtype(dtype) or types.is_bool_dtype(dtype):
        return "numbers"
    found = list(dict.fromkeys(_kind(value) for value in column if not is_missing(value)))
    if not found:
        return "no values"
    return found[0] if len(found) == 1 else " and ".join(found)


def _kind(value: Any) -> str:
    import datetime

    if isinstance(value, str):
        if value.lower().endswith(SUFFIXES):
            return "images"
        return "numbers as text" if is_number(value) else "text"
    if isinstance(value, bytes | Path) or (isinstance(value, Mapping) and value.keys() & {"bytes", "path"}):
        return "images"
    if isinstance(value, datetime.date | datetime.timedelta):
        return "dates"
    if hasattr(value, "__len__"):
        return "arrays"
    return "numbers" if is_real(value) else type(value).__name__


def is_real(value: Any) -> bool:
    """Whether a value is a number, true or false, or a decimal."""
    try:
        return not isinstance(value, complex) and float(value) == float(value)
    except (TypeError, ValueError, OverflowError):
        return False


def _number_column(frame: Any, name: Any) -> Array:
    """A column of numbers without missing values: bool, whole numbers, or float64."""
    column = frame[name]
    if isinstance(column.dtype, np.dtype) and column.dtype.kind in "biuf":
        return np.asarray(column)
    try:
        return stored(list(column), f"data: column {str(name)!r}")
    except (TypeError, ValueError) as err:
        raise DataError(f"data: column {str(name)!r} is no column of numbers ({one_line(err)})") from err


def _one(frame: Any, name: Any, place: str) -> Array:
    """The one column that is the input: arrays of one shape, images, or numbers, shape (N,)."""
    place = f"{place}: column {name!r}"
    kind = kind_of(frame[name])
    if kind in ("text", "numbers as text", "dates"):
        raise DataError(f"{place} holds {_in_words(frame[name], kind)}")
    if kind == "numbers":
        return numbers_or_images(_number_column(frame, name), place)
    return numbers_or_images([_image(value) for value in frame[name]], place)


def _targets(frame: Any, target: Any, task: str | None) -> tuple[Array, Order | None]:
    """The targets of a table, and the order of their classes."""
    if (several := _several(target, list(frame.columns))) is not None:
        for name in several:
            if (kind := kind_of(frame[name])) != "numbers":
                raise DataError(f"data: the target {name!r} holds {_in_words(frame[name], kind)}")
            _check_complete(frame, name, "target")
        return stored(np.stack([_number_column(frame, name) for name in several], axis=1), "data"), None
    column, place = frame[target], f"data: column {target!r}"
    missing = [row for row, value in enumerate(column) if is_missing(value)]
    if missing:
        unlabelled = ", or -1" if order_of(column) is not None else ""
        raise DataError(
            f"data: {_row(frame, missing[0])} has no label in column {target!r} (missing{unlabelled}); "
            f"fill or leave out {len(missing)} such rows"
        )
    if (kind := kind_of(column)) == "dates":
        raise DataError(f"{place} holds {_in_words(column, kind)}; a target is a number or a text")
    if target in frame.attrs.get(LISTS_OF_CLASSES, ()):
        raise DataError(
            f"{place} holds lists of classes (Sequence of ClassLabel); give zeros and ones, one for each "
            "class"
        )
    values = texts_of_bytes(
        stored(_number_column(frame, target) if kind == "numbers" else list(column), place), place
    )
    if values.dtype == object or (values.dtype.kind == "U" and values.ndim > 1):
        raise DataError(f"{place} holds {kind}; a target is a number or a text")
    if task != REGRESSION and values.dtype.kind == "i" and values.ndim == 1 and values.min() < 0:
        row = int(values.argmin())
        raise DataError(
            f"data: {_row(frame, row)} has the label {values[row]} in {target!r}; classes begin at 0"
        )
    return values, order_of(column)
