"""The glyph pool: endless labelled pictures of glyphs that are not digits, for pre-training.

Classes are letters (both cases together where they look alike), Greek letters, symbols and invented
scribbles. Masks are drawn once; every batch is augmented and coloured afresh.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.data.embedded import styles
from rayfed.data.embedded.glyphs import (
    CANVAS,
    TEXT_FONTS,
    Jitter,
    enlarge,
    normal,
    render,
    strip,
    uniform,
    warp,
)
from rayfed.seeds import generator

LETTERS = (
    "A", "B", "D", "E", "F", "G", "H", "J", "L", "M", "N", "Q", "R", "T", "Y",
    "a", "b", "d", "e", "f", "g", "h", "j", "m", "n", "q", "r", "t", "y",
    "Cc", "Il", "Kk", "Oo", "Pp", "Ss", "Uu", "Vv", "Ww", "Xx", "Zz",
)  # fmt: skip
"""Classes of Latin letters: the characters that belong to one class."""

SYMBOLS = tuple("ΓΔΘΛΞΠΣΦΨΩαβγδεζηθλμξπστφψω&@#%?+=<>{}[]/\\~§¶€£¥∞∫√∂∇±÷≠→↑")
"""Classes of one character each, drawn in the fonts that have all of them."""

NUM_SCRIBBLES = 24
"""Classes of invented pen strokes; a class is a path, an instance bends it."""

SYMBOL_FONTS = tuple(name for name in TEXT_FONTS if name.startswith("DejaVu") or name == "STIXGeneral")

_PATH_POINTS = 40
_SEED = 11


_JITTER = Jitter(rotate_deg=25, scale=(0.75, 1.35), stretch=0.3, shear=0.3, shift=0.08, elastic=0.03)


@dataclass(frozen=True, kw_only=True)
class PoolStyle:
    """How pictures of the pool vary; shares are probabilities for each picture.

    Attributes:
        jitter: Limits of the geometric changes.
        coarse: Share that passes through 8 x 8 pixels, as scanned handwriting does.
        neighbours: Share that has a glyph on a side, for each side.
        photo: Share with a photograph as paper.
        black: Share of white ink on black paper.
        contrast: Smallest and largest difference of brightness between ink and paper.
        blur: Smallest and largest standard deviation of the blur, in pixels.
        grain: Largest standard deviation of the noise.
    """

    jitter: Jitter = _JITTER
    coarse: float = 0.3
    neighbours: float = 0.25
    photo: float = 0.3
    black: float = 0.15
    contrast: tuple[float, float] = (0.2, 0.8)
    blur: tuple[float, float] = (0.1, 1.0)
    grain: float = 0.06

    def eased(self, difficulty: float) -> PoolStyle:
        """An easier style on the way from clean white glyphs on black (0) to this one (1)."""
        by, low_blur, jitter = difficulty, self.blur[0], self.jitter
        return replace(
            self,
            jitter=Jitter(
                rotate_deg=by * jitter.rotate_deg,
                scale=(1 + by * (jitter.scale[0] - 1), 1 + by * (jitter.scale[1] - 1)),
                stretch=by * jitter.stretch,
                shear=by * jitter.shear,
                shift=by * jitter.shift,
                elastic=by * jitter.elastic,
            ),
            coarse=by * self.coarse,
            neighbours=by * self.neighbours,
            photo=by * self.photo,
            black=1 - by * (1 - self.black),
            blur=(low_blur, low_blur + by * (self.blur[1] - low_blur)),
            grain=by * self.grain,
        )


class GlyphPool:
    """A source of batches; the same generator state gives the same batch.

    Attributes:
        classes: Class names; a label is an index into them.
    """

    def __init__(self, max_classes: int | None = None) -> None:
        """Draw all masks; with `max_classes`, only the first classes appear as labels."""
        scribbles = [f"scribble-{i:02d}" for i in range(NUM_SCRIBBLES)]
        self.classes = (*LETTERS, *SYMBOLS, *scribbles)[:max_classes]
        self._photos = styles.Photos()
        self._masks, rows = _bank()  # (rows, CANVAS, CANVAS)
        self._first, self._count = rows[:, 0], rows[:, 1]
        self._paths = _scribble_paths()

    def batch(
        self, n: int, rng: np.random.Generator, style: PoolStyle | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw n pictures with classes drawn uniformly.

        Args:
            n: How many.
            rng: Source of every random number.
            style: How pictures vary; None means PoolStyle().

        Returns:
            Pictures, (n, 3, SIDE, SIDE) float32 in [0, 1]; labels, (n,) int64.
        """
        return self.described_batch(n, rng, style)[:2]

    def described_batch(
        self, n: int, rng: np.random.Generator, style: PoolStyle | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `batch`, and the kind of paper of each picture, (n,): 0 coloured, 1 black, 2 a photograph."""
        style = style or PoolStyle()
        labels = rng.integers(len(self.classes), size=n)
        middle = _coarsen(self._draw(labels, rng), style.coarse, rng)
        sides = []
        for _ in range(2):
            present = torch.from_numpy(rng.random(n) < style.neighbours)[:, None, None]
            sides.append(self._masks[torch.from_numpy(rng.integers(len(self._masks), size=n))] * present)
        ink = warp(strip(sides[0], middle, sides[1]), style.jitter, rng)
        images, kinds = self._colour(ink, style, rng)
        return images, torch.from_numpy(labels), kinds

    def _draw(self, labels: np.ndarray, rng: np.random.Generator) -> Tensor:
        masks = torch.empty(len(labels), CANVAS, CANVAS)
        num_fonts = len(self._first)
        printed, scribbled = np.flatnonzero(labels < num_fonts), np.flatnonzero(labels >= num_fonts)
        mine = labels[printed]
        rows = self._first[mine] + (rng.random(len(mine)) * self._count[mine]).astype(np.int64)
        masks[torch.from_numpy(printed)] = self._masks[torch.from_numpy(rows)]
        paths = self._paths[torch.from_numpy(labels[scribbled] - num_fonts)]
        masks[torch.from_numpy(scribbled)] = _trace(paths, rng)
        return masks

    def _colour(self, ink: Tensor, style: PoolStyle, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        n = len(ink)
        dark, light = styles.colour_pairs(n, style.contrast, rng)
        front, back = styles.swap(dark, light, 0.5, rng)
        kind = torch.from_numpy(rng.random(n))
        black = (kind < style.black)[:, None]
        front, back = torch.where(black, torch.ones(1), front), torch.where(black, torch.zeros(1), back)
        paper = styles.gradient(back, 0.2, rng)
        photo = torch.from_numpy(np.flatnonzero((kind >= 1 - style.photo).numpy()))
        patches = self._photos.patches(len(photo), rng)
        # Ink at the far end of the brightness scale stays visible on a photograph.
        is_dark = styles.luma(patches.mean(dim=(2, 3))) < 0.5
        strength = uniform(rng, 0.0, 0.3, len(photo), 3)
        paper[photo], front[photo] = patches, torch.where(is_dark[:, None], 1 - strength, strength)
        paper = torch.where(black[:, :, None, None], torch.zeros(1), paper)
        kinds = black[:, 0].long()
        kinds[photo] = 2
        images = styles.soften(styles.paint(ink, front, paper), style.blur, rng)
        return styles.grain(images, style.grain, rng), kinds


def _bank() -> tuple[Tensor, np.ndarray]:
    """Masks of all printed characters, grouped by class, and (first row, number of rows) of each class."""
    fonts = {font: render([*"".join(LETTERS)], font) for font in TEXT_FONTS}
    symbols = {font: render(SYMBOLS, font) for font in SYMBOL_FONTS}
    groups: list[list[Tensor]] = []
    position = 0
    for characters in LETTERS:
        group = range(position, position + len(characters))
        groups.append([fonts[font][i] for i in group for font in TEXT_FONTS])
        position += len(characters)
    groups += [[symbols[font][i] for font in SYMBOL_FONTS] for i in range(len(SYMBOLS))]
    counts = np.array([len(group) for group in groups])
    first = np.cumsum(counts) - counts
    return torch.stack([mask for group in groups for mask in group]), np.stack([first, counts], axis=1)


def _coarsen(masks: Tensor, share: float, rng: np.random.Generator) -> Tensor:
    chosen = torch.from_numpy(np.flatnonzero(rng.random(len(masks)) < share))
    margin = CANVAS // 6
    inner = masks[chosen][:, None, margin : CANVAS - margin, margin : CANVAS - margin]
    small = F.interpolate(inner, size=(8, 8), mode="area")[:, 0]
    # Thin strokes fade in 8 x 8 pixels; a scanner's threshold would keep them.
    small = small / small.amax(dim=(1, 2), keepdim=True).clamp(min=1e-3)
    masks[chosen] = enlarge(small)
    return masks


def _scribble_paths() -> Tensor:
    """Control points of the scribble classes: (NUM_SCRIBBLES, 5, 2) in [-1, 1], neighbours well apart."""
    rng = generator(_SEED, "scribbles")
    paths = uniform(rng, -1, 1, NUM_SCRIBBLES, 256, 5, 2)
    steps = (paths[:, :, 1:] - paths[:, :, :-1]).norm(dim=-1).amin(dim=-1)
    return paths[torch.arange(NUM_SCRIBBLES), steps.argmax(dim=1)]


def _trace(paths: Tensor, rng: np.random.Generator) -> Tensor:
    """Draw bent versions of paths with a pen of random width: (n, 5, 2) to (n, CANVAS, CANVAS)."""
    n = len(paths)
    knots = paths * 0.7 + 0.07 * normal(rng, *paths.shape)
    line = F.interpolate(knots.transpose(1, 2), size=_PATH_POINTS, mode="linear", align_corners=True)
    # Rounding the corners of the polygon is what turns it into handwriting.
    smooth = F.avg_pool1d(F.pad(line, [2, 2], mode="replicate"), 5, stride=1)  # (n, 2, points)
    axis = torch.linspace(-1, 1, CANVAS)
    dx = smooth[:, 0, None, :] - axis[:, None]  # (n, CANVAS, points)
    dy = smooth[:, 1, None, :] - axis[:, None]
    distance = torch.empty(n, CANVAS, CANVAS).fill_(torch.inf)
    for point in range(_PATH_POINTS):
        here = dy[:, :, None, point].square() + dx[:, None, :, point].square()
        torch.minimum(distance, here, out=distance)
    width = uniform(rng, 0.06, 0.14, n)[:, None, None]
    return ((width - distance.sqrt()) * (CANVAS / 3) + 0.5).clamp(0, 1)
