"""Glyph masks: real handwriting and rendered fonts, and geometric jitter.

A mask is the coverage of each pixel by ink, in [0, 1]. Masks have CANVAS x CANVAS pixels with the glyph in
the middle; `warp` returns SIDE x SIDE pixels. All random numbers are drawn from the generator that is passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.errors import DataError

CANVAS = 48
"""Side of a mask in pixels; it is larger than an image, so that warped edges are smooth."""

SIDE = 32
"""Side of an image in pixels."""

TEXT_FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSans-BoldOblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSansMono-Oblique",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSerif-Italic",
    "DejaVuSerif-BoldItalic",
    "STIXGeneral",
    "STIXGeneralBol",
    "STIXGeneralItalic",
    "STIXGeneralBolIta",
    "cmb10",
    "cmr10",
    "cmss10",
    "cmti10",
    "cmtt10",
)
"""Fonts with Latin letters and digits that matplotlib contains, in a fixed order."""

_EM = 40
_HAND_PAD = 2


def font_file(name: str) -> Path:
    """The file of a font that matplotlib contains.

    Raises:
        DataError: This installation of matplotlib does not have it.
    """
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf"
    if not path.is_file():
        raise DataError(f"embedded data: matplotlib has no font {name!r}; reinstall matplotlib")
    return path


def render(characters: Sequence[str], font: str) -> Tensor:
    """Draw characters, each centred by its bounding box.

    Returns:
        Masks, shape (len(characters), CANVAS, CANVAS), float32 in [0, 1].
    """
    from PIL import Image, ImageDraw, ImageFont

    # The basic layout engine is always compiled in, so the masks do not depend on optional libraries.
    face = ImageFont.truetype(str(font_file(font)), _EM, layout_engine=ImageFont.Layout.BASIC)
    masks = []
    for character in characters:
        image = Image.new("L", (CANVAS, CANVAS))
        left, top, right, bottom = face.getbbox(character)
        corner = ((CANVAS - left - right) / 2, (CANVAS - top - bottom) / 2)
        ImageDraw.Draw(image).text(corner, character, fill=255, font=face)
        masks.append(np.asarray(image, dtype=np.float32) / 255)
    return torch.from_numpy(np.stack(masks))


def handwriting() -> tuple[Tensor, np.ndarray]:
    """The 1,797 handwritten digits of scikit-learn (UCI optical recognition of digits, 8 x 8 pixels).

    Returns:
        Masks, enlarged smoothly and sharpened, float32, shape (1797, CANVAS, CANVAS), and labels, int64,
        shape (1797,).
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images.astype(np.float32) / 16)
    return enlarge(images), bunch.target.astype(np.int64)


def enlarge(small: Tensor) -> Tensor:
    """Enlarge images of 8 x 8 pixels to masks that look like pen strokes.

    Args:
        small: Coverage of the pixels in [0, 1], shape (n, 8, 8).

    Returns:
        Masks, shape (n, CANVAS, CANVAS), with the image in the middle two thirds.
    """
    padded = F.pad(small[:, None], [_HAND_PAD] * 4)
    large = F.interpolate(padded, size=(CANVAS, CANVAS), mode="bicubic", align_corners=False)[:, 0]
    edge = ((large - 0.2) / 0.5).clamp(0, 1)
    return edge * edge * (3 - 2 * edge)


@dataclass(frozen=True, kw_only=True)
class GlyphJitter:
    """Limits of random geometric changes of a glyph, which are uniform and symmetric about no change.

    Attributes:
        rotate_deg: Largest rotation in degrees.
        scale: Smallest and largest factor on the glyph's size.
        stretch: Largest relative difference between width and height.
        shear: Largest horizontal shear.
        shift: Largest shift in each direction, as a fraction of the image's side.
        elastic: Standard deviation of a smooth random displacement, as a fraction of the image's side.
    """

    rotate_deg: float = 0.0
    scale: tuple[float, float] = (1.0, 1.0)
    stretch: float = 0.0
    shear: float = 0.0
    shift: float = 0.0
    elastic: float = 0.0


def uniform(rng: np.random.Generator, low: float, high: float, *shape: int) -> Tensor:
    """Uniform float32 numbers in [low, high) from a NumPy generator."""
    return torch.from_numpy(rng.uniform(low, high, shape).astype(np.float32))


def normal(rng: np.random.Generator, *shape: int) -> Tensor:
    """Standard normal float32 numbers from a NumPy generator."""
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


def warp(masks: Tensor, jitter: GlyphJitter, rng: np.random.Generator) -> Tensor:
    """Shift, rotate, stretch and bend every mask by random amounts.

    Args:
        masks: Shape (n, CANVAS, width); the middle CANVAS columns of a wider mask are in the result.
        jitter: Limits of the changes.
        rng: Generator of the random numbers.

    Returns:
        Masks, shape (n, SIDE, SIDE).
    """
    n, height, width = masks.shape
    angle = uniform(rng, -1, 1, n) * jitter.rotate_deg * torch.pi / 180
    size = 1 / uniform(rng, *jitter.scale, n)
    stretch = uniform(rng, -1, 1, n) * jitter.stretch
    shear = uniform(rng, -1, 1, n) * jitter.shear
    shift = uniform(rng, -2, 2, n, 2) * jitter.shift
    cos, sin = angle.cos() * size, angle.sin() * size
    wide, tall = 1 + stretch / 2, 1 - stretch / 2
    theta = torch.stack(
        [
            torch.stack([cos * wide, -sin * tall + shear * cos, shift[:, 0]], dim=1),
            torch.stack([sin * wide, cos * tall + shear * sin, shift[:, 1]], dim=1),
        ],
        dim=1,
    )  # (n, 2, 3), output coordinates to input coordinates
    grid = F.affine_grid(theta, [n, 1, SIDE, SIDE], align_corners=False)
    if jitter.elastic:
        coarse = normal(rng, n, 2, 5, 5) * 2 * jitter.elastic
        field = F.interpolate(coarse, size=(SIDE, SIDE), mode="bicubic", align_corners=True)
        grid = grid + field.permute(0, 2, 3, 1)
    grid[..., 0] *= height / width
    return F.grid_sample(masks[:, None], grid, mode="bilinear", align_corners=False)[:, 0]


STRIDE = 28
"""Distance between neighbouring characters in a strip, in pixels of a mask."""


def strip(left: Tensor, middle: Tensor, right: Tensor) -> Tensor:
    """Put three characters side by side, as in a house number.

    Args:
        left: Masks, shape (n, CANVAS, CANVAS); a mask of zeros leaves the place empty.
        middle: Masks of the same shape.
        right: Masks of the same shape.

    Returns:
        Masks, shape (n, CANVAS, CANVAS + 2 * STRIDE).
    """
    out = torch.zeros(len(middle), CANVAS, CANVAS + 2 * STRIDE)
    for place, mask in enumerate((left, middle, right)):
        window = out[:, :, place * STRIDE : place * STRIDE + CANVAS]
        torch.maximum(window, mask, out=window)
    return out
