"""Features as samples, for losses and clusterings that compare distributions of features."""

from __future__ import annotations

from torch import Tensor

STRIDE = 8
"""`samples_of` takes every eighth row and every eighth column of a feature map."""


def samples_of(features: Tensor) -> Tensor:
    """Features as rows, for statistics over samples.

    Args:
        features: Shape (B, width), or a map of shape (B, width, H, W).

    Returns:
        Features as they are, or one row for each pixel of every eighth row and column, shape (n, width).
    """
    return features if features.ndim == 2 else features[:, :, ::STRIDE, ::STRIDE].movedim(1, -1).flatten(0, 2)
