"""The data of one client: rows of the shared memory map, made into normalised batches on demand."""

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
"""Row numbers of the data set by split name."""


@dataclass(frozen=True)
class Normalizer:
    """Turns uint8 images into what a backbone expects: (x / 255 - mean) / std per channel."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __call__(self, images: npt.NDArray[np.uint8], device: str = "cpu") -> torch.Tensor:
        """Args: images, shape (B, H, W, 3). Returns: float32, shape (B, 3, H, W)."""
        std = torch.tensor(self.std, device=device).view(1, 3, 1, 1)
        mean = torch.tensor(self.mean, device=device).view(1, 3, 1, 1)
        x = torch.from_numpy(images).to(device).permute(0, 3, 1, 2).float()
        return x.mul_(1 / (255 * std)).sub_(mean / std).contiguous()


@dataclass(frozen=True)
class ClientData:
    """Splits of one client over the examples all clients share.

    Attributes:
        images: All inputs of the data set, uint8, read only: images (N, H, W, 3) or symbols (N, length).
        targets: What a model shall answer: labels, int64, shape (N,), or masks, uint8, shape (N, H, W).
        splits: Which rows are this client's, by split name.
        normalize: From stored inputs to network input.
        device: Where batches are put.
    """

    images: npt.NDArray[np.uint8]
    targets: npt.NDArray[Any]
    splits: Splits
    normalize: Callable[[npt.NDArray[np.uint8], str], torch.Tensor]
    device: str = "cpu"

    def size(self, split: str) -> int:
        """Number of examples in a split; 0 where the client has no such split."""
        rows = self.splits.get(split)
        return 0 if rows is None else len(rows)

    def batch(self, split: str, positions: torch.Tensor) -> Batch:
        """The examples at these positions of a split, in that order."""
        rows = self.splits[split][positions.numpy()]
        x = self.normalize(self.images[rows], self.device)
        return x, torch.from_numpy(self.targets[rows]).to(self.device).long()
