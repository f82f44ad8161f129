"""Which keys of a run's config may change when it goes on, and which ones did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HARMLESS = (
    "cluster",
    "checkpoint",
    "failures",
    "on_nonfinite",
    "tensorboard",
    "trackers",
    "output",
    "overwrite",
    "data.root",
    "data.cache",
)
"""Keys that may change: where it runs, how it is kept, and where the same images are now."""

BINDING = ("cluster.threads",)
"""Keys below those that may not: float sums depend on them."""


def changes(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Keys that would change a result and differ, with both values; lists and tuples are the same."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in {**old, **new}:
            yield from changes(old.get(name), new.get(name), f"{key}.{name}" if key else str(name))
    elif _plain(old) != _plain(new) and (not _under(key, HARMLESS) or _under(key, BINDING)):
        yield key, old, new


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _under(key: str, prefixes: Sequence[str]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)
