"""Copies a prepared data set to the nodes of a Ray cluster that do not have it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import ray

from rayfed.errors import ConfigError, one_line
from rayfed.executors.node_check import NodeFacts, on_node

CHUNK = 64 * 2**20
"""Bytes of a data set that are sent to the nodes at a time."""


def without_room(path: Path, nodes: Sequence[NodeFacts]) -> list[str]:
    """A line for each node that lacks a file and has no room for it."""
    size = path.stat().st_size
    return [
        f"{node.name}: {node.disk / 1e9:.1f} GB free, but {path.name} has {size / 1e9:.1f} GB"
        for node in nodes
        if node.data != size and node.disk < size
    ]


def copy_to_nodes(path: Path, nodes: Sequence[NodeFacts]) -> None:
    """Copy a prepared file to all nodes that have none of its size at its place.

    Raises:
        ConfigError: A node has no room for it, or cannot write there; a part of the message for each.
    """
    size = path.stat().st_size
    without = [node for node in nodes if node.data != size]
    if problems := without_room(path, without):
        raise ConfigError(f"data.cache: {'; '.join(problems)}")
    token = secrets.token_hex(6)
    with path.open("rb") as stream:
        for start in range(0, size, CHUNK):
            part = ray.put(stream.read(CHUNK))
            end = start + CHUNK >= size
            written = [
                on_node(node.node, write_part).remote(path, token, start, part, size if end else None)
                for node in without
            ]
            for node, reference in zip(without, written, strict=True):
                try:
                    why = ray.get(reference)
                except ray.exceptions.RayError as err:
                    why = one_line(err)
                if why:
                    problems.append(f"{node.name}: cannot write {path}: {why}")
            if problems:
                raise ConfigError(
                    f"data.cache: {'; '.join(problems)}; set data.cache to a folder that every node can write"
                )


def write_part(path: Path, token: str, start: int, content: bytes, size: int | None) -> str:
    """Write a part of a file under a temporary name, on the machine where this runs.

    Args:
        path: Where the file will be.
        token: Tells this copy from others.
        start: Position of the part, in bytes.
        content: The part.
        size: Bytes of the whole file, with its last part, after which it gets its name; None: others follow.

    Returns:
        Why it could not be written; empty: it was.
    """
    unfinished = path.with_name(f"{path.name}.{token}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("r+b" if start else "wb") as stream:
            stream.seek(start)
            stream.write(content)
        if size is not None:
            if unfinished.stat().st_size != size:
                return "parts of it are missing"
            unfinished.replace(path)
    except OSError as err:
        with suppress(OSError):
            unfinished.unlink()
        return err.strerror or str(err)
    return ""
