"""Describes an object to the bit, so that it can be compared with what it is later."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


def look(value: Any, seen: dict[int, Any] | None = None) -> Any:
    """What an object is: values, flags, keys, types and memory, of everything that is reached from it.

    Args:
        value: Any object.
        seen: Objects that were described already, by identity; they stay alive in it.
    """
    seen = {} if seen is None else seen
    if isinstance(value, PLAIN):
        return value if value == value else "nan"
    if id(value) in seen:
        return ("again", id(value))
    seen[id(value)] = value
    return (type(value).__qualname__, id(value), _content(value, seen))


def _content(value: Any, seen: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        flags = (value.dtype, value.shape, value.stride(), value.requires_grad, value.is_leaf)
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return flags, value.data_ptr(), raw, look(value.grad if value.is_leaf else None, seen)
    if isinstance(value, np.ndarray):
        where = (value.__array_interface__["data"], value.flags.writeable, value.strides)
        return (
            value.dtype.str,
            value.shape,
            where,
            repr(value.tolist()) if value.dtype == object else value.tobytes(),
        )
    if isinstance(value, Mapping):
        return [(look(key, seen), look(each, seen)) for key, each in value.items()]
    if isinstance(value, list | tuple | deque):
        return [look(each, seen) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    kind = type(value).__module__.partition(".")[0]
    if kind == "pandas":
        return _table(value)
    if kind == "datasets":
        return str(value.features), value.format, value._fingerprint, value.with_format(None).to_dict()
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        parts = (*cells, value.__defaults__, vars(value), value.__code__)
        return [look(each, seen) for each in parts]
    if isinstance(value, type):
        return {name: id(each) for name, each in vars(value).items() if name != "__weakref__"}
    if isinstance(value, nn.Module) or hasattr(value, "__dict__"):
        return look(vars(value), seen)
    return None


def _table(table: Any) -> Any:
    cells = [(name, str(kind), [repr(each) for each in table[name]]) for name, kind in table.dtypes.items()]
    return cells, list(table.index), dict(table.attrs), table.shape


def random_streams() -> Any:
    """The states of the random streams of this process."""
    import random

    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, keys.tobytes(), rest, torch.get_rng_state().numpy().tobytes()
