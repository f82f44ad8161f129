"""Coordinates of the cells of a study: their names, their order, and the names of the cells' folders."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from rayfed.errors import ConfigError, shown
from rayfed.user_files import as_scalar

Value: TypeAlias = str | int | float | bool | None
Key: TypeAlias = tuple[Value, ...]
"""The values of a cell, in the order of the names of the coordinates."""

SEED, PART = "seed", "part"
"""Names of the coordinates over which the scores of a row are averaged: first parts, then seeds."""

BARE = ("method", "setting", PART)
"""Names of coordinates that are left out where their value is shown."""

NAMES = {
    1: ("method",),
    2: ("method", SEED),
    3: ("method", "setting", SEED),
    4: ("method", "setting", PART, SEED),
}
"""Names of the coordinates of tuples without names, by the length of the tuples."""

LONGEST = 120
"""Letters of the name of a folder, beyond which its end is replaced by a digest."""


def plain_value(name: str, value: Any) -> Value:
    """A coordinate as a plain value; numbers of NumPy become those of Python.

    Raises:
        ConfigError: It is neither a number, a text, a truth value nor None.
    """
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if value is None or isinstance(value, str | int | float | bool):
        found: Value = value
        return found
    raise ConfigError(
        f"study: {name}={shown(value)} is no coordinate; give a text or a number that names the cell"
    )


def named_values(key: str, values: Any) -> list[tuple[Any, Any]]:
    """Name and value of each choice of a key.

    Args:
        key: The key, for the message.
        values: A list of values that name themselves, or these by name.

    Raises:
        ConfigError: It is neither, or objects have no names.
    """
    if isinstance(values, Mapping) and values:
        return list(values.items())
    is_list = isinstance(values, Iterable) and not isinstance(values, str | Mapping)
    listed = list(values) if is_list else []
    if not listed:
        raise ConfigError(f"{key}: {shown(values)} is no list of values, such as [0.01, 0.1]")
    if not all(each is None or isinstance(each, str | int | float | np.generic) for each in listed):
        raise ConfigError(f"{key}: {shown(values)} has objects without a name; give a dict of them")
    return [(each, each) for each in listed]


def keys_of(
    cells: Mapping[Any, Any] | Iterable[tuple[Any, Any]], names: Sequence[str] | None
) -> tuple[tuple[str, ...], dict[Key, Any]]:
    """The names of the coordinates, and what each cell holds by its key.

    Args:
        cells: What the cells hold, by their coordinates; or pairs of both. Coordinates are a dict, a tuple,
            or one value.
        names: Names of the coordinates of tuples; None: those of `NAMES`.

    Raises:
        ConfigError: There are no cells, two have the same coordinates, or their names differ.
    """
    pairs = list(cells.items() if isinstance(cells, Mapping) else cells)
    if not pairs:
        raise ConfigError("study: there are no cells; give one experiment or more, by coordinates")
    known = None if names is None else tuple(names)
    found: dict[Key, Any] = {}
    for at, held in pairs:
        own = _names_of(at, known)
        known = known or own
        if set(own) != set(known):
            raise ConfigError(
                f"study: {shown(at)} has the coordinates {', '.join(own)}, and other cells have "
                f"{', '.join(known)}; give all cells the same names"
            )
        values = dict(zip(own, _values_of(at), strict=True))
        key = tuple(plain_value(name, values[name]) for name in known)
        if key in found:
            raise ConfigError(f"study: two cells have the coordinates {in_words(key, known)}")
        found[key] = held
    assert known is not None  # there is a cell
    if wrong := [name for name in known if not isinstance(name, str) or not name or name == "round"]:
        raise ConfigError(f"study: {wrong[0]!r} cannot be the name of a coordinate; choose another one")
    return known, found


def _names_of(at: Any, names: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(at, Mapping):
        return tuple(at)
    values = _values_of(at)
    own = tuple(getattr(at, "_fields", ())) or names or NAMES.get(len(values))
    if own is None or len(own) != len(values):
        wanted = f"{len(own)} names" if own else "no names"
        raise ConfigError(
            f"study: {shown(at)} has {len(values)} coordinates and {wanted}; give Study(cells, names=[...])"
        )
    return tuple(own)


def _values_of(at: Any) -> tuple[Any, ...]:
    if isinstance(at, Mapping):
        return tuple(at.values())
    return tuple(at) if isinstance(at, tuple | list) else (at,)


def find_key(at: Any, names: Sequence[str]) -> Key:
    """The key for coordinates in one of the forms of `keys_of`. Args: names: those of the study."""
    if isinstance(at, Mapping):
        if set(at) != set(names):
            raise ConfigError(f"study: {shown(dict(at))} are not the coordinates {', '.join(names)}")
        return tuple(plain_value(name, at[name]) for name in names)
    return tuple(plain_value("coordinate", value) for value in _values_of(at))


def in_words(key: Key, names: Sequence[str]) -> str:
    """The coordinates of a cell, such as `fedprox, train.lr=0.1, seed=0`."""
    return ", ".join(_text(name, value) for name, value in zip(names, key, strict=True))


def _text(name: str, value: Value) -> str:
    return str(value) if name in BARE else f"{name}={value}"


def row_of(key: Key, names: Sequence[str]) -> Key:
    """The coordinates of a cell without its seed and its part: those of a row of the tables."""
    return tuple(value for name, value in zip(names, key, strict=True) if name not in (SEED, PART))


def row_at(values: Mapping[str, Any], names: Sequence[str]) -> Key:
    """The coordinates of a trial without seed and part; None for a key that it does not have.

    >>> row_at({"tuning": "lora", "data.held_out": ["art"]}, ("tuning", "data.held_out", "train.lr", "seed"))
    ('lora', '["art"]', None)
    """
    return row_of(tuple(as_scalar(values.get(name)) for name in names), names)


def row_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names of the coordinates of a row."""
    return tuple(name for name in names if name not in (SEED, PART))


def labels_of(keys: Iterable[Key], names: Sequence[str]) -> dict[Key, str]:
    """The label of each row, such as `fedprox train.lr=0.1`: its coordinates that differ between rows.

    Args:
        keys: The cells.
        names: Names of their coordinates.
    """
    rows = list(dict.fromkeys(row_of(key, names) for key in keys))
    own = row_names(names)
    differ = [place for place in range(len(own)) if len({row[place] for row in rows}) > 1] or [0]
    labels: dict[Key, str] = {}
    for row in rows:
        label = " ".join(_text(own[place], row[place]) for place in differ if own) or "all"
        labels[row] = label if label not in labels.values() else f"{label} ({row!r})"
    return labels


def folders_of(keys: Iterable[Key], names: Sequence[str]) -> dict[Key, str]:
    """The name of the folder of each cell, such as `fedprox-train.lr=0.1-seed0`; no two are the same."""
    folders: dict[Key, str] = {}
    for key in keys:
        texts = [
            f"seed{value}" if name == SEED else _text(name, value)
            for name, value in zip(names, key, strict=True)
        ]
        plain = "-".join(texts)
        name = re.sub(r"[^\w.=,+-]+", "-", plain)
        if name != re.sub(r"\s+", "-", plain) or len(name) > LONGEST or name.startswith("."):
            name = f"{name.lstrip('.')[:LONGEST]}-{_digest(key)}"
        taken = {each.casefold() for each in folders.values()}
        folders[key] = f"{name}-{_digest(key)}" if name.casefold() in taken else name
    return folders


def _digest(key: Key) -> str:
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:8]
