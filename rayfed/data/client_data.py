"""The data of one client: samples of the mapped data set, normalised batch by batch when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rayfed.types import Batch

Indices = npt.NDArray[np.int64]
Splits = Mapping[str, Indices]
"""Indices of samples in the data set, ascending, by name of the split."""


@dataclass(frozen=True)
class Normalizer:
    """Converts uint8 images into the input of a backbone: (x / 255 - mean) / std by channel."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __call__(self, images: npt.NDArray[np.uint8], device: str = "cpu") -> torch.Tensor:
        """Normalise a batch.

        Args:
            images: uint8, shape (B, H, W, 3).
            device: Device of the result.

        Returns:
            float32, shape (B, 3, H, W).
        """
        std = torch.tensor(self.std, device=device).view(1, 3, 1, 1)
        mean = torch.tensor(self.mean, device=device).view(1, 3, 1, 1)
        x = torch.from_numpy(images).to(device).permute(0, 3, 1, 2).float()
        return x.mul_(1 / (255 * std)).sub_(mean / std).contiguous()


@dataclass(frozen=True)
class ClientData:
    """The splits of one client as indices into arrays that all clients share.

    Attributes:
        images: All inputs of the data set, uint8, read-only: images (N, H, W, 3) or symbols (N, length).
        targets: All targets: labels, int64, shape (N,), or masks, uint8, shape (N, H, W).
        splits: Indices of the samples of this client by split.
        normalize: Converts stored inputs into network input on a device.
        device: Device of the batches.
    """

    images: npt.NDArray[np.uint8]
    targets: npt.NDArray[Any]
    splits: Splits
    normalize: Callable[[npt.NDArray[np.uint8], str], torch.Tensor]
    device: str = "cpu"

    def size(self, split: str) -> int:
        """Number of examples in a split; 0 if the client has no such split."""
        rows = self.splits.get(split)
        return 0 if rows is None else len(rows)

    def batch(self, split: str, positions: torch.Tensor) -> Batch:
        """The examples at some positions of a split, in the order of the positions.

        Args:
            split: Name of the split.
            positions: Positions in the split, int64, shape (B,).

        Returns:
            Network input, shape (B, ...), and targets, int64, shape (B,) or (B, H, W).
        """
        rows = self.splits[split][positions.numpy()]
        x = self.normalize(self.images[rows], self.device)
        return x, torch.from_numpy(self.targets[rows]).to(self.device).long()
