"""The listing of a data set that a reader returns, all samples without their content, and what labels can be.

One rule is for arrays, tables and files. A class is a text, a whole number from 0, or true or false. Where
the source has an order of classes (`ClassLabel` of the library `datasets`, a Categorical of pandas, a
dictionary column of Arrow), class i of the source is output i. Otherwise texts are in alphabetical order, and
whole numbers by value.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rayfed.data.text import Text, Tokens
from rayfed.errors import DataError, printable, shown

log = logging.getLogger("rayfed.data.readers")  # what readers say of a folder, which prepare shows, too

ONE_DOMAIN = "all"
"""The domain of a data set that has no domains."""

SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".dib", ".webp", ".gif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".jp2", ".j2k", ".avif"),
)
"""Suffixes of the files that are read as images, whatever their case."""

Decoded: TypeAlias = NDArray[np.uint8] | tuple[NDArray[np.uint8], ...] | Text | Tokens
"""One sample: the array of its input, or of its input and its target; of a data set of texts a `Text`, which
`rayfed.data.tokens` makes `Tokens`."""


class BadImageError(DataError):
    """An image cannot be decoded; `data.on_bad_image=skip` leaves it out instead of stopping."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Listing:
    """All samples of a data set, without their content.

    Attributes:
        name: Name of the data set.
        classes: Class names; a label is an index into them.
        domains: Domain names.
        keys: Unique name of each sample, `domain/class/file`, the same on every machine.
        labels: int64, shape (N,).
        domain: Index into `domains`, int64, shape (N,).
        test: Whether a sample is in the official test split of the data set, bool, shape (N,); all False if
            there is none.
        fingerprint: A text that changes whenever a sample changes; computed without decoding.
        grouped: Whether samples whose keys differ in the last part only form a group, such as the slices of
            a patient; a partition keeps groups together (`rayfed.data.partition.groups`).
        owners: Name of the client of each sample, N names, for `data.partition.scheme=natural`; None if the
            data set names no clients.
        splits: Split that the data set gives each sample, uint8, shape (N,): 1: train, 2: val, 3: test, 0:
            none; None if it gives none. Under `data.partition.scheme=natural` clients keep them.
        test_name: Name that the data set gives its official test split, such as validation; empty: none.
    """

    name: str
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    keys: Sequence[str]
    labels: NDArray[np.int64]
    domain: NDArray[np.int64]
    test: NDArray[np.bool_]
    fingerprint: str
    grouped: bool = False
    owners: Sequence[str] | None = None
    splits: NDArray[np.uint8] | None = None
    test_name: str = ""

    def __post_init__(self) -> None:
        """Check that all names can be shown on a terminal and in reports as they are.

        Raises:
            DataError: The name of a class, a domain or a client has control or direction characters.
        """
        named = {"class": self.classes, "domain": self.domains, "client": self.owners or ()}
        for what, names in named.items():
            for each in names:
                if not each.isprintable():
                    raise DataError(
                        f"data: the name {each!a} of a {what} of {self.name!r} has characters that "
                        f"cannot be printed; rename it in the data set"
                    )


ALLOWED = "labels are whole numbers from 0, or text"
"""Ends the message about a label that is no class."""

MOST_DIGITS = 18
"""Digits of a whole number that is ordered by its value; longer ones are text."""

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|nan|[+-]?inf", re.IGNORECASE)
"""A text that is a number, where all labels are."""

UNLABELLED = ("-1", "-1.0")
"""Texts that say that an example has no label."""

Where: TypeAlias = Callable[[int], str]
"""Words for a row, from 0, for messages."""


@cache
def warn_once(message: str) -> None:
    """Warn once per process, because data are listed several times."""
    log.warning("%s", printable(message))


def in_order(name: str) -> tuple[int, str]:
    """Whole numbers by value, before other text; a key for sorting."""
    is_number = name.isascii() and name.isdecimal() and len(name) <= MOST_DIGITS
    return (int(name), name) if is_number else (1 << 62, name)


def is_missing(value: Any) -> bool:
    """Whether there is no value: None, NaN, NaT, pandas.NA, a masked value, or a text of blanks only."""
    if isinstance(value, str):
        return not value.strip()
    if value is None or value is np.ma.masked or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, np.datetime64 | np.timedelta64):
        return bool(np.isnat(value))
    if isinstance(value, Decimal):
        return value.is_nan()  # one that signals cannot be compared
    return isinstance(value, Real) and bool(value != value)  # NaN is not itself


def name_of(value: Any) -> str:
    """The name of the class that a label says.

    Raises:
        ValueError: It says none.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, str):
        return value
    number: Any = value if isinstance(value, Real | Decimal) else -1
    if number >= 0 and number % 1 == 0:
        return str(int(number))
    raise ValueError("no class")


def classes_of(
    values: Sequence[Any], where: Where, order: Sequence[str] | None = None
) -> tuple[NDArray[np.int64], list[str]]:
    """The class of each label, and the names of the classes.

    Args:
        values: Label of each example, N.
        where: Words for a row.
        order: Names of the classes in the order of the source; None: it has none.

    Returns:
        Labels, int64, shape (N,), and the names in their order.

    Raises:
        DataError: A label is no class, or two labels differ by blanks or by their type only.
    """
    first: dict[tuple[type, Any], int] = {}
    for row, value in enumerate(values):
        try:
            first.setdefault((type(value), value), row)
        except TypeError as err:  # a list, a dict or an array
            raise DataError(f"{where(row)} has the label {shown(value)}; {ALLOWED}") from err
    names = _names(first, where)
    found = list(order) if order is not None else sorted(set(names.values()), key=in_order)
    number = {name: place for place, name in enumerate(found)}
    of_value = {key: number[name] for key, name in names.items()}
    labels = np.fromiter((of_value[type(each), each] for each in values), np.int64, len(values))
    return labels, found


def _names(first: dict[tuple[type, Any], int], where: Where) -> dict[tuple[type, Any], str]:
    """The name of each label that occurs. Args: first: the first row of each type and value."""
    named: dict[tuple[type, Any], str] = {}
    for key, row in first.items():
        value = key[1]
        if is_missing(value):
            raise DataError(f"{where(row)} has no label ({shown(value)}); {ALLOWED}")
        try:
            named[key] = name_of(value)
        except ValueError as err:
            raise DataError(f"{where(row)} has the label {shown(value)}; {ALLOWED}") from err
    texts = [key for key in named if issubclass(key[0], str | bytes)]
    numeric = bool(texts) and len(texts) == len(named) and all(map(NUMBER.fullmatch, named.values()))
    for key in texts:
        name = named[key]
        whole = numeric and not (name.isascii() and name.isdecimal())
        try:
            named[key] = name_of(float(name)) if whole else name
        except (ValueError, OverflowError):
            whole = False
            name = UNLABELLED[0]
        if not whole and name in UNLABELLED:
            raise DataError(f"{where(first[key])} has the label {shown(key[1])}; {ALLOWED}")
    _check_different(named, first, where)
    return named


def _check_different(
    named: dict[tuple[type, Any], str], first: dict[tuple[type, Any], int], where: Where
) -> None:
    """Raise DataError where two labels are one class, or would be, but for blanks or for their type."""
    seen: dict[str, tuple[type, Any]] = {}
    for key, name in named.items():
        is_flag = issubclass(key[0], bool | np.bool_)
        same = seen.setdefault(str(int(key[1])) if is_flag else plainly(name), key)
        if same is not key and (named[same] != name or _kind(same[0]) != _kind(key[0])):
            raise DataError(
                f"{where(first[key])} has the label {shown(key[1])}, and {where(first[same])} has "
                f"{shown(same[1])}; write a class in one way everywhere"
            )


def _kind(of: type) -> str:
    """Text, truth or number, of the type of a label."""
    if issubclass(of, bool | np.bool_):
        return "truth"
    return "text" if issubclass(of, str | bytes) else "number"


def plainly(name: str) -> str:
    """A name without blanks around it, its characters composed: names that look alike are equal then."""
    return unicodedata.normalize("NFC", name.strip())


def named_in_one_way(values: Sequence[Any], what: str, column: str) -> list[str]:
    """Names of clients, splits or domains as text.

    Args:
        values: Name in each row; none is missing.
        what: `client`, `split` or `domain`.
        column: The column, for messages.

    Raises:
        DataError: Two values, such as 1 and "1", or "ann" and "ann ", would be one name, or look like one.
    """
    first: dict[str, Any] = {}
    names = []
    for value in values:
        if isinstance(value, list | tuple | set | frozenset | dict | np.ndarray):
            raise DataError(f"data: column {column!r} holds {shown(value)}; a {what} is a text or a number")
        name = name_in_text(value)
        names.append(name)
        is_whole = isinstance(value, Real | np.bool_) and value % 1 == 0  # true is 1 for tables
        known = first.setdefault(str(int(value)) if is_whole else plainly(name), value)
        if known is value or (type(known) is type(value) and known == value):
            continue
        if not (_are_numbers(known, value) and known == value and str(known) == str(value)):
            raise DataError(
                f"data: {known!r} and {value!r} are both there in column {column!r}, and have one name; "
                f"write a {what} in one way everywhere"
            )
    return names


def name_in_text(value: Any) -> str:
    """The name of a client, a split or a domain as text; bytes are UTF-8, if they can be."""
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode()
    except UnicodeDecodeError:
        return str(value)


def _are_numbers(*values: Any) -> bool:
    """Whether all values are numbers, and none is true or false."""
    return all(isinstance(value, Real) and not isinstance(value, bool | np.bool_) for value in values)
