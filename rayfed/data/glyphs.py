"""Pictures of glyphs: handwriting and fonts, colours and photographs, and the digits of digits-five-mini.

A mask is the coverage of each pixel by ink, in [0, 1]. Masks have CANVAS x CANVAS pixels with the glyph in
the middle; `warp` returns SIDE x SIDE pixels. All random numbers are drawn from the generator that is passed.
Images are float32 in [0, 1], shape (n, 3, SIDE, SIDE).

digits-five-mini is a small substitute for Digit-Five (MNIST, MNIST-M, SVHN, SynthDigits, USPS): the ten
digits in five domains, made in about a second. Three domains show real handwriting, each sample in exactly
one domain and one split; two show rendered fonts.
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
from rayfed.seeds import generator

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


NAME = "digits-five-mini"
CLASSES = tuple("0123456789")
DOMAINS = ("plain", "inverted", "blended", "street", "fonts")
HANDWRITTEN = ("plain", "inverted", "blended")

TEST_PER_CLASS = 15
"""Number of test images of each class in each domain, 150 for each domain."""

RENDERED_PER_CLASS = 60
"""Number of images of each class in a rendered domain; a handwritten domain has 57 to 61."""

_SEED = 5
_STREET_FONTS = tuple(name for name in TEXT_FONTS if "Sans" in name or "Bol" in name)


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """A whole data set in memory, sorted by domain, then train before test.

    Attributes:
        name: Name of the data set.
        classes: Class names; a label is an index into them.
        domains: Domain names; a domain number is an index into them.
        images: RGB pixels, uint8, shape (N, 32, 32, 3).
        labels: Class of each sample, int64, shape (N,).
        domain: Domain number of each sample, int64, shape (N,).
        test: Whether a sample is in the official test split of its domain, bool, shape (N,).
        keys: Unique name of each sample, e.g. "plain/handwriting-0123" or "fonts/train-0007".
    """

    name: str
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    images: np.ndarray
    labels: np.ndarray
    domain: np.ndarray
    test: np.ndarray
    keys: list[str]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The samples of one domain; fields as in `Embedded`."""

    images: np.ndarray
    labels: np.ndarray
    test: np.ndarray
    keys: list[str]


def build() -> Embedded:
    """Make the data set; every call returns the same values."""
    photos = Photos()
    masks, labels = handwriting()
    shares = share_handwriting(labels)
    parts = []
    for domain in DOMAINS:
        if domain in HANDWRITTEN:
            parts.append(_handwriting(domain, masks, labels, shares[domain], photos))
        else:
            parts.append(_print(domain, photos))
    sizes = [len(part.labels) for part in parts]
    return Embedded(
        name=NAME,
        classes=CLASSES,
        domains=DOMAINS,
        images=np.concatenate([part.images for part in parts]),
        labels=np.concatenate([part.labels for part in parts]),
        domain=np.repeat(np.arange(len(parts)), sizes),
        test=np.concatenate([part.test for part in parts]),
        keys=[key for part in parts for key in part.keys],
    )


def share_handwriting(labels: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Assign every handwriting sample to one domain and one split, class by class.

    Args:
        labels: Class of each sample, shape (n,).

    Returns:
        Ascending indices of the training and the test samples of each domain. Each class has TEST_PER_CLASS
        samples in each test split; its numbers of samples differ by at most one between domains.
    """
    rng = generator(_SEED, NAME, "handwriting")
    train: dict[str, list[np.ndarray]] = {domain: [] for domain in HANDWRITTEN}
    test: dict[str, list[np.ndarray]] = {domain: [] for domain in HANDWRITTEN}
    for label in range(len(CLASSES)):
        mixed = rng.permutation(np.flatnonzero(labels == label))
        for number, domain in enumerate(HANDWRITTEN):
            mine = mixed[number :: len(HANDWRITTEN)]
            test[domain].append(mine[:TEST_PER_CLASS])
            train[domain].append(mine[TEST_PER_CLASS:])
    return {d: (np.sort(np.concatenate(train[d])), np.sort(np.concatenate(test[d]))) for d in HANDWRITTEN}


def _handwriting(
    domain: str,
    masks: Tensor,
    labels: np.ndarray,
    share: tuple[np.ndarray, np.ndarray],
    photos: Photos,
) -> _Part:
    samples = np.concatenate(share)
    rng = generator(_SEED, NAME, domain)
    ink = warp(masks[torch.from_numpy(samples)], GlyphJitter(), rng)
    return _Part(
        images=to_uint8(_dress(domain, ink, photos, rng)),
        labels=labels[samples],
        test=np.arange(len(samples)) >= len(share[0]),
        keys=[f"{domain}/handwriting-{sample:04d}" for sample in samples],
    )


def _print(domain: str, photos: Photos) -> _Part:
    rng = generator(_SEED, NAME, domain)
    num_test = TEST_PER_CLASS * len(CLASSES)
    num_train = RENDERED_PER_CLASS * len(CLASSES) - num_test
    labels = np.concatenate(
        [rng.permutation(np.arange(size) % len(CLASSES)) for size in (num_train, num_test)]
    ).astype(np.int64)
    ink = _house_numbers(labels, rng) if domain == "street" else _single_digits(labels, rng)
    return _Part(
        images=to_uint8(_dress(domain, ink, photos, rng)),
        labels=labels,
        test=np.arange(len(labels)) >= num_train,
        keys=[f"{domain}/train-{i:04d}" for i in range(num_train)]
        + [f"{domain}/test-{i:04d}" for i in range(num_test)],
    )


def _dress(domain: str, ink: Tensor, photos: Photos, rng: np.random.Generator) -> Tensor:
    """Colour masks, shape (n, SIDE, SIDE), in the style of a domain; returns (n, 3, SIDE, SIDE)."""
    n = len(ink)
    if domain == "plain":
        return white_on_black(ink)
    if domain == "blended":
        return difference(ink, photos.patches(n, rng))
    if domain == "inverted":
        dark, light = colour_pairs(n, (0.3, 0.8), rng)
        return paint(ink, dark, light)
    if domain == "street":
        front, wall = swap(*colour_pairs(n, (0.2, 0.6), rng), 0.5, rng)
        texture = soften(photos.patches(n, rng), (1.0, 2.0), rng)
        wall_image = 0.8 * gradient(wall, 0.15, rng) + 0.2 * texture
        return grain(soften(paint(ink, front, wall_image), (0.4, 1.1), rng), 0.06, rng)
    front, paper = swap(*colour_pairs(n, (0.2, 0.7), rng), 0.5, rng)
    return paint(ink, gradient(front, 0.15, rng), gradient(paper, 0.3, rng))


def _digit_masks(fonts: Sequence[str]) -> Tensor:
    return torch.stack([render(CLASSES, font) for font in fonts])  # (fonts, 10, CANVAS, CANVAS)


def _single_digits(labels: np.ndarray, rng: np.random.Generator) -> Tensor:
    """Masks of digits in many fonts, rotated and scaled, shape (n, SIDE, SIDE)."""
    masks = _digit_masks(TEXT_FONTS)[rng.integers(len(TEXT_FONTS), size=len(labels)), labels]
    return warp(masks, GlyphJitter(rotate_deg=35, scale=(0.7, 1.4), stretch=0.3, shear=0.3, shift=0.12), rng)


def _house_numbers(labels: np.ndarray, rng: np.random.Generator) -> Tensor:
    """Masks of a digit with neighbours that the border cuts off, shape (n, SIDE, SIDE)."""
    n = len(labels)
    masks = _digit_masks(_STREET_FONTS)
    fonts = rng.integers(len(_STREET_FONTS), size=n)
    neighbours = []
    for _ in range(2):
        present = torch.from_numpy(rng.random(n) < 0.75)[:, None, None]
        neighbours.append(masks[fonts, rng.integers(len(CLASSES), size=n)] * present)
    row = strip(neighbours[0], masks[fonts, labels], neighbours[1])
    return warp(row, GlyphJitter(rotate_deg=12, scale=(0.9, 1.3), stretch=0.3, shear=0.15, shift=0.05), rng)
