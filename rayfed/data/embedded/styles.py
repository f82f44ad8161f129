"""Turn masks of ink into colour images: colours, photographs as background, blur, noise.

Images are float32 in [0, 1], shape (n, 3, SIDE, SIDE); masks have shape (n, SIDE, SIDE).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.data.embedded.glyphs import SIDE, normal, uniform

_LUMA = (0.299, 0.587, 0.114)


class Photos:
    """Random patches of the two photographs that scikit-learn contains, at two scales."""

    def __init__(self) -> None:
        from sklearn.datasets import load_sample_images

        self._photos: list[np.ndarray] = []
        for photo in load_sample_images().images:
            full = torch.from_numpy(np.array(photo, dtype=np.float32) / 255).permute(2, 0, 1)
            self._photos += [full.numpy(), F.avg_pool2d(full, 3).numpy()]

    def patches(self, n: int, rng: np.random.Generator) -> Tensor:
        """Cut n patches, shape (n, 3, SIDE, SIDE), mirrored at random."""
        out = np.empty((n, 3, SIDE, SIDE), np.float32)
        which = rng.integers(len(self._photos), size=n)
        where = rng.random((n, 2))
        mirrored = rng.random(n) < 0.5
        for i, photo in enumerate(which):
            source = self._photos[photo]
            top, left = (int(where[i, d] * (source.shape[d + 1] - SIDE + 1)) for d in (0, 1))
            patch = source[:, top : top + SIDE, left : left + SIDE]
            out[i] = patch[:, :, ::-1] if mirrored[i] else patch
        return torch.from_numpy(out)


def luma(colours: Tensor) -> Tensor:
    """Perceived brightness of RGB colours; shape (..., 3) to shape (...)."""
    return (colours * torch.tensor(_LUMA)).sum(-1)


def colour_pairs(n: int, contrast: tuple[float, float], rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Random colours of ink and paper, shape (n, 3) each; the ink is darker than the paper.

    Their difference of brightness is drawn from the interval `contrast`; it is smaller if a channel
    saturates.
    """
    ink = uniform(rng, 0, 1, n, 3)
    paper = uniform(rng, 0, 1, n, 3)
    gap = uniform(rng, *contrast, n)
    middle = gap / 2 + uniform(rng, 0, 1, n) * (1 - gap)
    ink = ink + (middle - gap / 2 - luma(ink))[:, None]
    paper = paper + (middle + gap / 2 - luma(paper))[:, None]
    return ink.clamp(0, 1), paper.clamp(0, 1)


def swap(a: Tensor, b: Tensor, share: float, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Exchange each row of a with that of b with the probability `share`."""
    chosen = torch.from_numpy(rng.random(len(a)) < share)[:, None]
    return torch.where(chosen, b, a), torch.where(chosen, a, b)


def paint(masks: Tensor, ink: Tensor, paper: Tensor) -> Tensor:
    """Draw ink on paper; returns images (n, 3, SIDE, SIDE).

    Args:
        masks: Shape (n, SIDE, SIDE).
        ink: Colours (n, 3) or images (n, 3, SIDE, SIDE).
        paper: Colours (n, 3) or images (n, 3, SIDE, SIDE).
    """
    ink, paper = (c if c.ndim == 4 else c[:, :, None, None] for c in (ink, paper))
    cover = masks[:, None]
    return paper * (1 - cover) + ink * cover


def white_on_black(masks: Tensor) -> Tensor:
    """Grey strokes on black, as in MNIST."""
    return masks[:, None].repeat(1, 3, 1, 1)


def difference(masks: Tensor, patches: Tensor) -> Tensor:
    """Absolute difference of strokes and photo patches, as in MNIST-M.

    Ganin and Lempitsky, Unsupervised domain adaptation by backpropagation, 2015, sec. 4.
    """
    return (patches - masks[:, None]).abs()


def gradient(colours: Tensor, strength: float, rng: np.random.Generator) -> Tensor:
    """Images (n, 3, SIDE, SIDE) of colours (n, 3), with brightness that changes linearly over the image."""
    direction = uniform(rng, -strength, strength, len(colours), 2)
    axis = torch.linspace(-1, 1, SIDE)
    slope = direction[:, 0, None, None] * axis[:, None] + direction[:, 1, None, None] * axis
    return (colours[:, :, None, None] + slope[:, None]).clamp(0, 1)


def soften(images: Tensor, blur: tuple[float, float], rng: np.random.Generator) -> Tensor:
    """Blur each image with a Gaussian, whose standard deviation in pixels is drawn from `blur`."""
    n, channels = images.shape[:2]
    sigma = uniform(rng, *blur, n).clamp(min=0.05)
    taps = torch.exp(-0.5 * (torch.arange(-2, 3) / sigma[:, None]) ** 2)
    taps = (taps / taps.sum(1, keepdim=True)).repeat_interleave(channels, 0)
    stack = F.pad(images, [2] * 4, mode="replicate").reshape(1, n * channels, SIDE + 4, SIDE + 4)
    stack = F.conv2d(stack, taps[:, None, None, :], groups=n * channels)
    stack = F.conv2d(stack, taps[:, None, :, None], groups=n * channels)
    return stack.reshape(images.shape)


def grain(images: Tensor, strength: float, rng: np.random.Generator) -> Tensor:
    """Add sensor noise whose standard deviation is drawn from [0, strength] for each image."""
    level = uniform(rng, 0, strength, len(images))[:, None, None, None]
    return (images + level * normal(rng, *images.shape)).clamp(0, 1)


def to_uint8(images: Tensor) -> np.ndarray:
    """Convert images to pixels, uint8, shape (n, SIDE, SIDE, 3)."""
    return (images.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
