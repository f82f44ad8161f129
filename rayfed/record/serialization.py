"""Writes nested values of tensors, numbers and strings into one safetensors file, and reads them back.

Containers are stored as JSON in the metadata of the file, which refers to its tensors by name. Reading a
file runs no code of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayfed.documents import checked_depth, parse_json

TREE = "tree"


def to_bytes(value: Any, where: str) -> bytes:
    """A safetensors file with all tensors of a nested value.

    Args:
        value: Tensors, numbers, strings, booleans, None, and dicts, lists and tuples of these.
        where: Description of the value, for errors.

    Raises:
        TypeError: It holds something else; the message says where.
        DocumentError: Its containers are nested too deeply.
    """
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    tree = _flatten(value, where, tensors)
    return save(_contiguous_copies(tensors), metadata={TREE: json.dumps(checked_depth(tree))})


def from_file(path: Path) -> Any:
    """Undo `to_bytes`.

    Raises:
        ValueError: The file is not one that `to_bytes` wrote.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tree = parse_json((file.metadata() or {})[TREE])
            return _restore(tree, {name: file.get_tensor(name).clone() for name in file.keys()})  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError) as err:
        raise ValueError(f"{path.name} is not a saved state: {err}") from err


def _flatten(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON: types that JSON lacks become `{kind: content}`; tensors are added to `tensors`."""
    kind = type(value)
    if isinstance(value, Tensor):
        name = where if where not in tensors else f"{where}#{len(tensors)}"
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"{where}: the key {key!r} is neither a string nor an integer")
        return {"dict": [[key, _flatten(v, f"{where}/{key}", tensors)] for key, v in value.items()]}
    if kind in (list, tuple):
        items = [_flatten(v, f"{where}/{i}", tensors) for i, v in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if value is None or kind in (bool, int, float, str):
        return value
    raise TypeError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}; only tensors, numbers, strings and dicts, "
        f"lists and tuples of these outlive a round"
    )


def _restore(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_restore(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_restore(item, tensors) for item in content)
    if kind != "dict":
        raise KeyError(kind)
    return {key: _restore(item, tensors) for key, item in content}


def _contiguous_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU copies that share no storage, as safetensors requires."""
    seen: set[int] = set()
    found = {}
    for name, value in tensors.items():
        held = value.cpu().contiguous()
        storage = held.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != held.numel() * held.element_size():
            held = held.clone(memory_format=torch.contiguous_format)
        seen.add(held.untyped_storage().data_ptr())
        found[name] = held
    return found
