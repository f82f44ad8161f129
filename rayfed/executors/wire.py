"""Messages between processes: tensors packed into a few arrays, which Ray can map without copying."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rayfed.devices import ALIGNMENT
from rayfed.types import Params, Update


@dataclass(frozen=True)
class Packed:
    """Named tensors of any types in one array per type, of one or of several clients.

    Attributes:
        layout: Name, type and shape of each tensor, in order.
        flat: The values of all tensors of a type, by type, shape (clients, values of a client). Each tensor
            begins at a multiple of `ALIGNMENT` bytes, and zeros fill the place before the next one.
        clients: Number of clients.
        origins: For each tensor of one client a number that it has wherever it was packed in an exchange, so
            that it can be one tensor again where it arrives.
    """

    layout: tuple[tuple[str, str, tuple[int, ...]], ...]
    flat: dict[str, npt.NDArray[Any]]
    clients: int
    origins: tuple[int, ...] = ()


PackedUpdate: TypeAlias = tuple[dict[str, Any], Packed, int]
"""The fields of an update but its parameters, the packed parameters of clients, and its row there."""


def pack(params: Mapping[str, Tensor]) -> Packed:
    """Copy named CPU tensors into one array per type."""
    return _pack([params], tuple(map(id, params.values())))


def has_same_content(one: Packed, other: Packed) -> bool:
    """Whether two messages have the same tensors with the same values, bit by bit."""
    if (one.layout, one.origins) != (other.layout, other.origins):
        return False
    return all(
        np.array_equal(flat.view(np.uint8), other.flat[kind].view(np.uint8))
        for kind, flat in one.flat.items()
    )


def unpack(packed: Packed, known: dict[int, Tensor] | None = None) -> Params:
    """Views into packed arrays of one client.

    They must not be changed: other processes may map the same memory.

    Args:
        packed: What `pack` returned.
        known: Tensors that came before in the same exchange, by their origin; new ones are added. None: those
            that are one tensor at the sender are several ones here.
    """
    (params,) = _unpack(packed)
    if known is None:
        return params
    pairs = zip(params.items(), packed.origins, strict=True)
    return {name: known.setdefault(origin, value) for (name, value), origin in pairs}


def _pack(each: Sequence[Mapping[str, Tensor]], origins: tuple[int, ...] = ()) -> Packed:
    """Copy the tensors of clients, whose names, types and shapes are the same."""
    first = each[0]
    layout = tuple((name, str(v.dtype).removeprefix("torch."), tuple(v.shape)) for name, v in first.items())
    parts: dict[str, list[Tensor]] = {}
    for name, kind, shape in layout:
        stack = torch.stack([params[name] for params in each]) if len(each) > 1 else first[name]
        values = stack.detach().reshape(len(each), -1)
        parts.setdefault(kind, []).append(values)
        if rest := _place(kind, shape) - values.shape[1]:
            parts[kind].append(values.new_zeros(len(each), rest))
    flat = {kind: _as_array(torch.cat(values, 1)) for kind, values in parts.items()}
    return Packed(layout, flat, len(each), origins)


def _unpack(packed: Packed) -> list[Params]:
    """Views into packed arrays, for each client."""
    places: dict[str, list[int]] = {}
    for _, kind, shape in packed.layout:
        places.setdefault(kind, []).append(_place(kind, shape))
    parts = {kind: iter(_as_tensor(flat, kind).split(places[kind], 1)) for kind, flat in packed.flat.items()}
    columns = [
        next(parts[kind])[:, : math.prod(shape)].view(packed.clients, *shape).unbind(0)
        for _, kind, shape in packed.layout
    ]
    names = [name for name, _, _ in packed.layout]
    return [dict(zip(names, (column[k] for column in columns), strict=True)) for k in range(packed.clients)]


def _place(kind: str, shape: tuple[int, ...]) -> int:
    """Values of this type that the place of a tensor of this shape takes in a packed array."""
    size: int = getattr(torch, kind).itemsize
    return -(-math.prod(shape) * size // ALIGNMENT) * ALIGNMENT // size


def encode(value: Any) -> Any:
    """Replace every tensor inside containers by an array, recursively."""
    if isinstance(value, Tensor):
        return pack({"": value})
    if isinstance(value, Mapping):
        return {k: encode(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(encode, value))
    return value


def decode(value: Any, copy: bool = False, known: dict[int, Tensor] | None = None) -> Any:
    """Undo `encode`; tensors are read-only views unless copied. `known` is as of `unpack`."""
    if isinstance(value, Packed):
        tensor = unpack(value, known)[""]
        return tensor.clone() if copy else tensor
    if isinstance(value, dict):
        return {k: decode(v, copy, known) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(decode(v, copy, known) for v in value)
    return value


OTHERS = ("extra", "scored")
"""Fields of an update with tensors besides its parameters."""


def encode_updates(updates: Sequence[Update]) -> list[PackedUpdate]:
    """Pack the parameters of updates, those of clients with the same names, types and shapes together."""
    alike: dict[Any, list[int]] = {}
    for i, update in enumerate(updates):
        key = tuple((name, value.dtype, value.shape) for name, value in update.params.items())
        alike.setdefault(key, []).append(i)
    encoded: dict[int, PackedUpdate] = {}
    for indices in alike.values():
        packed = _pack([updates[i].params for i in indices])
        for row, i in enumerate(indices):
            rest = {name: value for name, value in vars(updates[i]).items() if name != "params"}
            others = {name: encode(rest[name]) for name in OTHERS}
            encoded[i] = (rest | others, packed, row)
    return [encoded[i] for i in range(len(updates))]


def decode_updates(parts: Sequence[PackedUpdate]) -> list[Update]:
    """Undo `encode_updates`."""
    known: dict[int, list[Params]] = {}
    updates = []
    for rest, packed, row in parts:
        if id(packed) not in known:
            known[id(packed)] = _unpack(packed)
        others = {name: decode(rest[name]) for name in OTHERS}
        updates.append(Update(**rest | others | {"params": known[id(packed)][row]}))
    return updates


def _as_array(value: Tensor) -> npt.NDArray[Any]:
    value = value.contiguous()
    return (value.view(torch.int16) if value.dtype == torch.bfloat16 else value).numpy()


def _as_tensor(array: npt.NDArray[Any], kind: str) -> Tensor:
    with warnings.catch_warnings():
        # Arrays from the object store are read-only for numpy; torch only warns about it.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        value = torch.from_numpy(array)
    return value.view(torch.bfloat16) if kind == "bfloat16" else value
