"""The data of one client: stored examples, normalised batch by batch on its device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rayfed.data.examples import Examples
from rayfed.data.row_table import Splits
from rayfed.devices import HOST
from rayfed.types import Batch


class Normalizer:
    """Converts uint8 images into the input of a backbone: (x / 255 - mean) / std by channel."""

    def __init__(
        self,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        device: torch.device = HOST,
    ) -> None:
        """Args: mean, std: by channel. device: that of the images."""
        spread = torch.tensor(std, device=device).view(1, 3, 1, 1)
        self._factor = 1 / (255 * spread)
        self._offset = torch.tensor(mean, device=device).view(1, 3, 1, 1) / spread

    def __call__(self, images: Tensor) -> Tensor:
        """Normalise a batch.

        Args:
            images: uint8, shape (B, H, W, 3).

        Returns:
            float32, shape (B, 3, H, W), on the same device.
        """
        channels = images.permute(0, 3, 1, 2)
        x = channels.to(torch.float32, memory_format=torch.contiguous_format)  # else several times slower
        return x.mul_(self._factor).sub_(self._offset)


@dataclass(frozen=True)
class ClientData:
    """The splits of one client, in examples that all clients of a process share.

    Attributes:
        client: Id of the client or of the evaluation set.
        examples: The stored examples of all clients.
        splits: Indices of the samples of this client by split.
        normalize: Converts stored inputs into network input, on their device.
        relabel: Changes the targets of training examples; None: they stay as they are.
    """

    client: str
    examples: Examples
    splits: Splits
    normalize: Callable[[Tensor], Tensor]
    relabel: Callable[[Tensor], Tensor] | None = None

    @property
    def device(self) -> torch.device:
        """Device of the batches."""
        return self.examples.device

    def size(self, split: str) -> int:
        """Number of examples in a split; 0 if the client has no such split."""
        rows = self.splits.get(split)
        return 0 if rows is None else len(rows)

    def batch(self, split: str, positions: Tensor) -> Batch:
        """The examples at some positions of a split, in the order of the positions.

        Args:
            split: Name of the split.
            positions: Positions in the split, int64, shape (B,), on the CPU.

        Returns:
            Network input, shape (B, ...), and targets, int64, shape (B,) or (B, H, W).
        """
        return next(self.batches(split, positions, len(positions)))

    def batches(self, split: str, order: Tensor | None, size: int) -> Iterator[Batch]:
        """Batches of a split, as `batch`; the next one may be copied to the device while one is used.

        Args:
            split: Name of the split.
            order: Positions in the split, int64, in the order of the batches; None: all in ascending order.
                On the CPU; resident examples also take it on their device.
            size: Examples in a batch; the last one may have fewer.
        """
        relabel = self.relabel if split == "train" else None
        for inputs, targets in self.examples.batches(self.client, split, order, size):
            y = targets.long()
            yield self.normalize(inputs), y if relabel is None else relabel(y)
