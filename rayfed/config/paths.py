"""Writes out the short forms of paths in a config: `~`, and a path in place of a section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rayfed.documents import user_path

PATHS = ("output", "data.root", "data.cache", "data.partition.file", "faults.trace", "model.pretrained")
"""Keys that may hold a path; `~` in them stands for a home folder."""


def spelled_out(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """`data.partition: path` written in full, as `data.partition.file: path`, and `~` in every path.

    Raises:
        ConfigError: A path begins with `~` and names no home folder, or the system allows no such path.
    """
    data = tree.get("data")
    if isinstance(data, Mapping) and isinstance(data.get("partition"), str):
        tree = {**tree, "data": {**data, "partition": {"file": data["partition"]}}}
    for key in PATHS:
        tree = _at_home(tree, key.split("."), key)
    return tree


def _at_home(tree: Mapping[str, Any], path: Sequence[str], key: str) -> Mapping[str, Any]:
    """The tree with the home folder written out in one value, where that is a path; the path is checked."""
    name, *rest = path
    value = tree.get(name)
    if rest:
        return {**tree, name: _at_home(value, rest, key)} if isinstance(value, Mapping) else tree
    if isinstance(value, str):
        there = user_path(value, key)
        return {**tree, name: str(there)} if value.startswith("~") else tree
    return tree
