"""Axial slices of medical volumes, as a two-dimensional model sees them.

The preparation of FedDG, HarmoFL and GRACE (Fed-Prostate): a slice comes with its two neighbours as channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

MEAN = 128
"""Grey level of a prepared slice that stands for the mean of its volume."""
ONE_SD = 32
"""Grey levels for one standard deviation of the volume."""
QUANTILE = 0.99
"""Of a volume's intensities; larger ones are set to it."""


@dataclass(frozen=True, eq=False)
class Volume:
    """One patient.

    Attributes:
        grey: uint8, shape (H, W, D): standardised intensities, see `standardised`.
        mask: uint8, shape (H, W, D): 1 where the organ is.
    """

    grey: NDArray[np.uint8]
    mask: NDArray[np.uint8]

    def slice(self, place: int, size: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """A slice with its neighbours as channels, (size, size, 3), and its mask, (size, size)."""
        around = self.grey[:, :, place - 1 : place + 2]
        mask = self.mask[:, :, place]
        if mask.shape == (size, size):
            return around, mask
        channels = [_resized(around[:, :, c], size, Image.Resampling.BILINEAR) for c in range(3)]
        return np.stack(channels, axis=-1), _resized(mask, size, Image.Resampling.NEAREST)


def make_volume(image: NDArray[Any], mask: NDArray[Any]) -> Volume:
    """From raw intensities and labels, both (H, W, D); every label above 0 is the organ.

    Raises:
        ValueError: They do not have the same three dimensions.
    """
    if image.ndim != 3 or image.shape != mask.shape:
        raise ValueError(f"image {image.shape} and mask {mask.shape} are not volumes of the same shape")
    return Volume(grey=standardised(image), mask=(mask > 0).astype(np.uint8))


def standardised(volume: NDArray[Any]) -> NDArray[np.uint8]:
    """Intensities clipped at their 99 % quantile, with mean and deviation of the volume removed.

    Kept as grey levels: MEAN is the mean of the volume and ONE_SD levels are one standard deviation, which
    the U-Net's normalisation undoes to within 1/64 of a deviation.
    """
    clipped = np.minimum(volume, np.quantile(volume, QUANTILE)).astype(np.float64)
    z = (clipped - clipped.mean()) / (clipped.std() or 1.0)
    return np.clip(np.rint(MEAN + ONE_SD * z), 0, 255).astype(np.uint8)


def usable_slices(mask: NDArray[Any]) -> list[int]:
    """Slices with some of the organ and two neighbours."""
    present = (mask > 0).any(axis=(0, 1))
    return [int(place) for place in np.flatnonzero(present) if 0 < place < mask.shape[2] - 1]


def _resized(plane: NDArray[np.uint8], size: int, how: Image.Resampling) -> NDArray[np.uint8]:
    return np.asarray(Image.fromarray(np.ascontiguousarray(plane)).resize((size, size), how))
