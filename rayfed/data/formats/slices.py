"""Prepare axial slices of medical volumes for two-dimensional models.

As in FedDG, HarmoFL and GRACE (Fed-Prostate), the three channels are a slice and its two neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayfed.data.grey_levels import DEVIATION_LEVELS, MEAN_LEVEL

QUANTILE = 0.99
"""Quantile of the intensities of a volume at which larger ones are clipped."""


@dataclass(frozen=True, eq=False)
class Volume:
    """The volume of one patient.

    Attributes:
        grey: Standardised intensities, uint8, shape (H, W, D), see `standardise`.
        mask: 1 in the organ, 0 elsewhere, uint8, shape (H, W, D).
    """

    grey: NDArray[np.uint8]
    mask: NDArray[np.uint8]

    def slice(self, place: int, size: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """A slice with its neighbours as channels, shape (size, size, 3), and its mask, shape (size, size).

        Args:
            place: Index of the slice, neither the first nor the last.
            size: Height and width of the result in pixels.
        """
        around = self.grey[:, :, place - 1 : place + 2]
        mask = self.mask[:, :, place]
        if mask.shape == (size, size):
            return around, mask
        channels = [_resize(around[:, :, c], size, "BILINEAR") for c in range(3)]
        return np.stack(channels, axis=-1), _resize(mask, size, "NEAREST")


def make_volume(image: NDArray[Any], mask: NDArray[Any]) -> Volume:
    """Make a volume from raw intensities and labels.

    Args:
        image: Intensities, shape (H, W, D).
        mask: Labels, shape (H, W, D); every label above 0 is the organ.

    Raises:
        ValueError: The arrays do not have the same three dimensions.
    """
    if image.ndim != 3 or image.shape != mask.shape:
        raise ValueError(f"image {image.shape} and mask {mask.shape} are not volumes of the same shape")
    return Volume(grey=standardise(image), mask=(mask > 0).astype(np.uint8))


def standardise(volume: NDArray[Any]) -> NDArray[np.uint8]:
    """Intensities clipped at QUANTILE and standardised, as grey levels, uint8, shape (H, W, D).

    `MEAN_LEVEL` is the mean of the volume, and `DEVIATION_LEVELS` levels are one standard deviation. The
    normalization of the U-Net turns grey levels back into standard deviations; rounding changes them by at
    most 1/64.
    """
    clipped = np.minimum(volume, np.quantile(volume, QUANTILE)).astype(np.float64)
    z = (clipped - clipped.mean()) / (clipped.std() or 1.0)
    return np.clip(np.rint(MEAN_LEVEL + DEVIATION_LEVELS * z), 0, 255).astype(np.uint8)


def usable_slices(mask: NDArray[Any]) -> list[int]:
    """Indices of the slices that show the organ and have two neighbours."""
    present = (mask > 0).any(axis=(0, 1))
    return [int(place) for place in np.flatnonzero(present) if 0 < place < mask.shape[2] - 1]


def _resize(plane: NDArray[np.uint8], size: int, how: str) -> NDArray[np.uint8]:
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(plane))
    return np.asarray(image.resize((size, size), Image.Resampling[how]))
