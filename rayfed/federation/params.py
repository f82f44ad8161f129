"""Arithmetic on tensors by name. All functions leave their arguments unchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rayfed.types import Params, Update, is_statistic


def subtract(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Params:
    """Differences a - b for all names of a."""
    return {name: value - b[name] for name, value in a.items()}


def sq_norm(a: Mapping[str, Tensor]) -> Tensor:
    """Sum of squares over all tensors; a scalar with gradient."""
    return torch.stack([value.pow(2).sum() for value in a.values()]).sum()


def sq_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Sum of squared differences over all names in a; a scalar with gradient."""
    return sq_norm(subtract(a, b))


def by_name(updates: Sequence[Update]) -> dict[str, list[Tensor]]:
    """The values of every name, in the order of the clients that sent it."""
    values: dict[str, list[Tensor]] = {}
    for update in updates:
        for name, value in update.params.items():
            values.setdefault(name, []).append(value)
    return values


def without_statistics(params: Mapping[str, Tensor]) -> Params:
    """Tensors that may take a step: all but running means and variances of BatchNorm layers."""
    return {name: value for name, value in params.items() if not is_statistic(name)}


def digest(params: Mapping[str, Tensor]) -> str:
    """SHA-256 hex digest over names, data types, shapes and bytes, in the sorted order of the names."""
    out = hashlib.sha256()
    for name in sorted(params):
        value = params[name].detach().cpu().contiguous()
        out.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        out.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return out.hexdigest()
