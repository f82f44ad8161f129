"""Runs a part of a model in automatic mixed precision, with a result in float32."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T", Tensor, list[Tensor])


def computed(part: Callable[[Tensor], T], x: Tensor, mixed: bool) -> T:
    """The result of a part of a model, in float32.

    Args:
        part: Maps a tensor to a tensor or to a list of tensors, such as a network.
        x: Its input, on the device that computes.
        mixed: Compute matrix products and convolutions in bfloat16.
    """
    with torch.autocast(x.device.type, torch.bfloat16) if mixed else nullcontext():
        result = part(x)
    return [each.float() for each in result] if isinstance(result, list) else result.float()
