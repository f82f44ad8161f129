"""Adaptive average pooling with the same bits in every run on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def use_mean_pooling(model: nn.Module) -> None:
    """Let adaptive average pooling be computed by `MeanPool`.

    Args:
        model: The model, on a GPU.
    """
    for module in model.modules():
        if type(module) is nn.AdaptiveAvgPool2d:
            module.__class__ = MeanPool


class MeanPool(nn.AdaptiveAvgPool2d):
    """Adaptive average pooling by means of windows.

    The backward pass of torch's kernel for GPUs adds in any order, so that two runs differ in the last bits.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Means of windows, shape (B, C, h, w).

        Args:
            x: A map, shape (B, C, H, W).
        """
        wanted = self.output_size
        pair = wanted if isinstance(wanted, tuple) else (wanted, wanted)
        high, wide = (_windows(size, parts or size) for size, parts in zip(x.shape[-2:], pair, strict=True))
        rows = [torch.stack([x[..., i, j].mean((-2, -1)) for j in wide], -1) for i in high]
        return torch.stack(rows, -2)


def _windows(size: int, parts: int) -> list[slice]:
    """The windows of adaptive pooling, which overlap where the size is no multiple of their number."""
    return [slice(k * size // parts, -(-(k + 1) * size // parts)) for k in range(parts)]
