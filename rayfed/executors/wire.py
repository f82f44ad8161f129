"""Messages between processes: tensors packed into a few arrays, which Ray can map without copying."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from rayfed.types import Params, Update


@dataclass(frozen=True)
class Packed:
    """Named tensors of any types in one array per type.

    Attributes:
        layout: Name, type and shape of each tensor, in order.
        flat: The concatenated values of all tensors of a type, by type.
    """

    layout: tuple[tuple[str, str, tuple[int, ...]], ...]
    flat: dict[str, npt.NDArray[Any]]


def pack(params: Mapping[str, Tensor]) -> Packed:
    """Copy named CPU tensors into one array per type."""
    layout = tuple((name, str(v.dtype).removeprefix("torch."), tuple(v.shape)) for name, v in params.items())
    parts: dict[str, list[Tensor]] = {}
    for (_, kind, _), value in zip(layout, params.values(), strict=True):
        parts.setdefault(kind, []).append(value.detach().reshape(-1))
    return Packed(layout, {kind: _as_array(torch.cat(values)) for kind, values in parts.items()})


def unpack(packed: Packed) -> Params:
    """Views into the packed arrays. They must not be changed: other processes may map the same memory."""
    sizes: dict[str, list[int]] = {}
    for _, kind, shape in packed.layout:
        sizes.setdefault(kind, []).append(math.prod(shape))
    parts = {kind: iter(_as_tensor(flat, kind).split(sizes[kind])) for kind, flat in packed.flat.items()}
    return {name: next(parts[kind]).view(shape) for name, kind, shape in packed.layout}


def encode(value: Any) -> Any:
    """Replace every tensor inside containers by an array, recursively."""
    if isinstance(value, Tensor):
        return pack({"": value})
    if isinstance(value, Mapping):
        return {k: encode(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(encode, value))
    return value


def decode(value: Any, copy: bool = False) -> Any:
    """Undo `encode`; tensors are read-only views unless copied."""
    if isinstance(value, Packed):
        tensor = unpack(value)[""]
        return tensor.clone() if copy else tensor
    if isinstance(value, dict):
        return {k: decode(v, copy) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(decode(v, copy) for v in value)
    return value


def encode_update(update: Update) -> tuple[Update, Packed]:
    """The update without its parameters, and the parameters packed."""
    return replace(update, params={}, extra=encode(update.extra)), pack(update.params)


def decode_update(parts: tuple[Update, Packed]) -> Update:
    """Undo `encode_update`."""
    update, packed = parts
    return replace(update, params=unpack(packed), extra=decode(update.extra))


def _as_array(value: Tensor) -> npt.NDArray[Any]:
    value = value.contiguous()
    return (value.view(torch.int16) if value.dtype == torch.bfloat16 else value).numpy()


def _as_tensor(array: npt.NDArray[Any], kind: str) -> Tensor:
    with warnings.catch_warnings():
        # Arrays from the object store are read-only for numpy; torch only warns about it.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        value = torch.from_numpy(array)
    return value.view(torch.bfloat16) if kind == "bfloat16" else value
