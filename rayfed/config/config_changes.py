"""Finds the keys in which two configs differ, of those that can change a result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from rayfed.config.settings import PATHS, Settings
from rayfed.models.model_config import HF

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
    "train.graphs",
    "evaluation.model_of",
)
"""Keys that may change: where clients run, what is saved, and where the same data and models are stored."""

BINDING = ("cluster.threads", "checkpoint.best")
"""Keys in these sections that may not change, as float sums or the final tensors depend on them."""

ENDING = ("rounds", "stop")
"""Keys that say after which round a run ends; a run that is continued may end later."""

OF_A_COMMAND = ("compare", "compare_options", "equal", "equal_steps", "protocol")
"""Keys of a command with several runs, which are none of a run."""


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Keys of two configs that differ and would change a result, with both values.

    Args:
        old: A config as plain containers; keys that its version of RayFed did not have are their defaults.
        new: A config of this version.
    """
    before, now = (_with_new_keys(_of_one_run(tree), Settings) for tree in (old, new))
    return changes(before, now)


def _of_one_run(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A config without the keys of a command with several runs, which earlier versions wrote into it."""
    return {key: value for key, value in tree.items() if key not in OF_A_COMMAND}


def _with_new_keys(tree: Mapping[str, Any], section: type) -> dict[str, Any]:
    """A section of a config with the defaults of the keys that it lacks."""
    found = dict(tree)
    kinds = get_type_hints(section)
    for each in dataclasses.fields(section):
        if each.name in found:
            if dataclasses.is_dataclass(kinds[each.name]) and isinstance(found[each.name], Mapping):
                found[each.name] = _with_new_keys(found[each.name], kinds[each.name])
        elif each.default is not dataclasses.MISSING:
            found[each.name] = each.default
        elif each.default_factory is not dataclasses.MISSING:
            value = each.default_factory()
            is_section = dataclasses.is_dataclass(value) and not isinstance(value, type)
            found[each.name] = dataclasses.asdict(value) if is_section else value
    return found


def changes(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Keys that differ and would change a result, with both values. Lists and tuples count as equal."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in {**old, **new}:
            yield from changes(old.get(name), new.get(name), f"{key}.{name}" if key else str(name))
    elif (
        _comparable(old) != _comparable(new)
        and not _same_path(key, old, new)
        and (not _under(key, HARMLESS) or _under(key, BINDING))
    ):
        yield key, old, new


def _comparable(value: Any) -> Any:
    return [_comparable(item) for item in value] if isinstance(value, list | tuple) else value


def _same_path(key: str, old: Any, new: Any) -> bool:
    """Whether two values of a key are one path. Earlier versions kept relative paths as they were written."""
    if key == "model.name" and str(old).startswith(HF) and str(new).startswith(HF):
        key, old, new = "model.weights", str(old).removeprefix(HF), str(new).removeprefix(HF)
    if key not in PATHS or not (isinstance(old, str) and isinstance(new, str)):
        return False
    return old == new or (
        not Path(old).is_absolute() and Path(new).parts[-len(Path(old).parts) :] == Path(old).parts
    )


def is_about_the_end(key: str) -> bool:
    """Whether a key says after which round a run ends."""
    return _under(key, ENDING)


def _under(key: str, prefixes: Sequence[str]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)
