"""Moves what clients receive to the device, and their answers back to the CPU, and checks the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rayfed.devices import HOST, moved
from rayfed.federation.channel import CODED
from rayfed.types import Broadcast, Params, Update


def arrived(
    messages: Sequence[tuple[Broadcast, Mapping[str, Any]]], device: torch.device
) -> list[tuple[Broadcast, dict[str, Any]]]:
    """Messages and stores of clients on a device; all tensors of a type travel together.

    Args:
        messages: The message and the private store of each client, on the CPU.
        device: Device of the model.
    """
    if device == HOST:
        return [(sent, dict(store)) for sent, store in messages]
    parts = moved([(sent.params, sent.shared, dict(store)) for sent, store in messages], device)
    pairs = zip(messages, parts, strict=True)
    return [(replace(sent, params=p, shared=shared), own) for (sent, _), (p, shared, own) in pairs]


def left(
    answers: list[tuple[Update, dict[str, Any]]], device: torch.device
) -> list[tuple[Update, dict[str, Any]]]:
    """Updates and stores of clients on the CPU; all tensors of a type travel together.

    Args:
        answers: The update and the private store of each client, on the device of the model.
        device: Device of the model.
    """
    if device == HOST:
        return answers
    parts = moved([(update.params, update.extra, store) for update, store in answers], HOST)
    pairs = zip(answers, parts, strict=True)
    return [(replace(update, params=p, extra=extra), own) for (update, _), (p, extra, own) in pairs]


def check_shapes(update: Update, wanted: Params) -> None:
    """Raise ValueError if an update has a tensor that the model does not have, or of another shape.

    Args:
        update: The answer of a client.
        wanted: Tensors of the model by global name.
    """
    for name, value in update.params.items():
        if name not in wanted:
            raise ValueError(f"it answered with {name!r}, which is not a trained tensor of this model")
        if value.shape != wanted[name].shape:
            shapes = f"{tuple(value.shape)} instead of {tuple(wanted[name].shape)}"
            raise ValueError(f"{name} has shape {shapes}")


def check_finite(updates: Sequence[Update]) -> None:
    """Raise FloatingPointError if trained values, also compressed ones, hold NaN or infinity.

    Names the first such tensor.

    Args:
        updates: Answers of clients, on the CPU.
    """
    alike: dict[tuple[str, torch.Size, torch.dtype], list[Tensor]] = {}
    for update in updates:
        coded = ((n, v) for n, parts in update.extra.get(CODED, {}).items() for v in parts.values())
        for name, value in (*update.params.items(), *coded):
            alike.setdefault((name, value.shape, value.dtype), []).append(value)
    for (name, shape, dtype), values in alike.items():
        if dtype.is_floating_point and 0 not in shape:
            each = torch.stack(values) if len(values) > 1 else values[0]
            # NaN is both the least and the largest value of a tensor that has any.
            if not torch.isfinite(torch.stack(each.aminmax())).all():
                raise FloatingPointError(f"{name} is not finite after the call; a smaller train.lr may help")
