"""Compares two configs of a run, and lists the keys that may change when it is continued."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HARMLESS = (
    "cluster",
    "checkpoint",
    "failures",
    "on_nonfinite",
    "tensorboard",
    "figures",
    "report",
    "trackers",
    "output",
    "overwrite",
    "data.root",
    "data.cache",
    "train.cache_memory",
    "evaluation.model_of",
)
"""Keys that may change: where clients run, what is saved, and where the same data and models are stored."""

BINDING = ("cluster.threads",)
"""Keys in these sections that may not change, because float sums depend on them."""


def changes(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Keys that differ and would change a result, with both values. Lists and tuples count as equal."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in {**old, **new}:
            yield from changes(old.get(name), new.get(name), f"{key}.{name}" if key else str(name))
    elif _plain(old) != _plain(new) and (not _under(key, HARMLESS) or _under(key, BINDING)):
        yield key, old, new


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _under(key: str, prefixes: Sequence[str]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)
