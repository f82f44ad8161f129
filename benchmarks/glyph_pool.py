"""The glyph pool: random labelled pictures of glyphs that are not digits, with captions, for pre-training.

Classes are letters (upper and lower case together if they look alike), Greek letters, symbols and invented
scribbles. Masks are drawn once; every batch is augmented and coloured at random.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.data import glyphs
from rayfed.data.glyphs import (
    CANVAS,
    TEXT_FONTS,
    GlyphJitter,
    enlarge,
    normal,
    render,
    strip,
    uniform,
    warp,
)
from rayfed.models.captions import LETTERS, NUM_SCRIBBLES, STYLES, SYMBOLS, TEMPLATES, class_names, tokenize
from rayfed.seeds import generator

SYMBOL_FONTS = tuple(name for name in TEXT_FONTS if name.startswith("DejaVu") or name == "STIXGeneral")

_PATH_POINTS = 40
_SEED = 11


_JITTER = GlyphJitter(rotate_deg=25, scale=(0.75, 1.35), stretch=0.3, shear=0.3, shift=0.08, elastic=0.03)


@dataclass(frozen=True, kw_only=True)
class PoolStyle:
    """Random variation of the pictures of the pool; shares are probabilities for each picture.

    Attributes:
        jitter: Limits of the geometric changes.
        coarse: Share of glyphs that are reduced to 8 x 8 pixels, like scanned handwriting, and enlarged.
        neighbours: Share of pictures with another glyph on the left side, and of those with one on the right.
        photo: Share of pictures with a photograph as background.
        black: Share of pictures with white ink on black background.
        contrast: Smallest and largest difference of brightness between ink and paper.
        blur: Smallest and largest standard deviation of the blur, in pixels.
        grain: Largest standard deviation of the noise.
    """

    jitter: GlyphJitter = _JITTER
    coarse: float = 0.3
    neighbours: float = 0.25
    photo: float = 0.3
    black: float = 0.15
    contrast: tuple[float, float] = (0.2, 0.8)
    blur: tuple[float, float] = (0.1, 1.0)
    grain: float = 0.06

    def eased(self, difficulty: float) -> PoolStyle:
        """A style between clean white glyphs on black (difficulty 0) and this one (difficulty 1)."""
        by = difficulty
        low_blur = self.blur[0]
        jitter = self.jitter
        return replace(
            self,
            jitter=GlyphJitter(
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
    """Draws batches of pictures; equal states of the generator give equal batches.

    Attributes:
        classes: Class names; a label is an index into them.
    """

    def __init__(self, max_classes: int | None = None) -> None:
        """Draw the masks of all classes.

        Args:
            max_classes: Use only this many classes, the first ones; None uses all.
        """
        scribbles = [f"scribble-{i:02d}" for i in range(NUM_SCRIBBLES)]
        self.classes = (*LETTERS, *SYMBOLS, *scribbles)[:max_classes]
        self._photos = glyphs.Photos()
        self._masks, rows = _bank()  # (rows, CANVAS, CANVAS)
        self._first = rows[:, 0]
        self._count = rows[:, 1]
        self._paths = _scribble_paths()

    def batch(
        self, n: int, rng: np.random.Generator, style: PoolStyle | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw n pictures of uniformly random classes.

        Args:
            n: Number of pictures.
            rng: Generator of the random numbers.
            style: Variation of the pictures; None means PoolStyle().

        Returns:
            Pictures, float32 in [0, 1], shape (n, 3, SIDE, SIDE), and labels, int64, shape (n,).
        """
        return self.described_batch(n, rng, style)[:2]

    def described_batch(
        self, n: int, rng: np.random.Generator, style: PoolStyle | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw pictures as `batch` does, with the kind of the background of each picture.

        Returns:
            Pictures and labels as `batch`, and kinds, int64, shape (n,): 0 coloured, 1 black, 2 a photograph.
        """
        style = style or PoolStyle()
        labels = rng.integers(len(self.classes), size=n)
        middle = _coarsen(self._glyphs(labels, rng), style.coarse, rng)
        sides = []
        for _ in range(2):
            present = torch.from_numpy(rng.random(n) < style.neighbours)[:, None, None]
            sides.append(self._masks[torch.from_numpy(rng.integers(len(self._masks), size=n))] * present)
        ink = warp(strip(sides[0], middle, sides[1]), style.jitter, rng)
        images, kinds = self._colour(ink, style, rng)
        return images, torch.from_numpy(labels), kinds

    def _glyphs(self, labels: np.ndarray, rng: np.random.Generator) -> Tensor:
        """A random mask of each class in `labels`, shape (n, CANVAS, CANVAS)."""
        masks = torch.empty(len(labels), CANVAS, CANVAS)
        num_fonts = len(self._first)
        printed = np.flatnonzero(labels < num_fonts)
        scribbled = np.flatnonzero(labels >= num_fonts)
        classes = labels[printed]
        rows = self._first[classes] + (rng.random(len(classes)) * self._count[classes]).astype(np.int64)
        masks[torch.from_numpy(printed)] = self._masks[torch.from_numpy(rows)]
        paths = self._paths[torch.from_numpy(labels[scribbled] - num_fonts)]
        masks[torch.from_numpy(scribbled)] = _trace(paths, rng)
        return masks

    def _colour(self, ink: Tensor, style: PoolStyle, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        n = len(ink)
        dark, light = glyphs.colour_pairs(n, style.contrast, rng)
        front, back = glyphs.swap(dark, light, 0.5, rng)
        kind = torch.from_numpy(rng.random(n))
        black = (kind < style.black)[:, None]
        front = torch.where(black, torch.ones(1), front)
        back = torch.where(black, torch.zeros(1), back)
        paper = glyphs.gradient(back, 0.2, rng)
        photo = torch.from_numpy(np.flatnonzero((kind >= 1 - style.photo).numpy()))
        patches = self._photos.patches(len(photo), rng)
        # Very light ink on dark photographs and very dark ink on light ones stays visible.
        is_dark = glyphs.luma(patches.mean(dim=(2, 3))) < 0.5
        strength = uniform(rng, 0.0, 0.3, len(photo), 3)
        paper[photo] = patches
        front[photo] = torch.where(is_dark[:, None], 1 - strength, strength)
        paper = torch.where(black[:, :, None, None], torch.zeros(1), paper)
        kinds = black[:, 0].long()
        kinds[photo] = 2
        images = glyphs.soften(glyphs.paint(ink, front, paper), style.blur, rng)
        return glyphs.grain(images, style.grain, rng), kinds


def _bank() -> tuple[Tensor, np.ndarray]:
    """Masks of all printed characters by class, and the first row and number of rows of each class."""
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
    # Thin strokes become pale in 8 x 8 pixels; scaling to full ink keeps them visible, like a threshold.
    small = small / small.amax(dim=(1, 2), keepdim=True).clamp(min=1e-3)
    masks[chosen] = enlarge(small)
    return masks


def _scribble_paths() -> Tensor:
    """Control points of the scribble classes, shape (NUM_SCRIBBLES, 5, 2), in [-1, 1].

    Each path is the one of 256 random paths whose successive points have the largest smallest distance.
    """
    rng = generator(_SEED, "scribbles")
    paths = uniform(rng, -1, 1, NUM_SCRIBBLES, 256, 5, 2)
    steps = (paths[:, :, 1:] - paths[:, :, :-1]).norm(dim=-1).amin(dim=-1)
    return paths[torch.arange(NUM_SCRIBBLES), steps.argmax(dim=1)]


def _trace(paths: Tensor, rng: np.random.Generator) -> Tensor:
    """Draw randomly bent paths, shape (n, 5, 2), with a pen of random width, to masks (n, CANVAS, CANVAS)."""
    n = len(paths)
    knots = paths * 0.7 + 0.07 * normal(rng, *paths.shape)
    line = F.interpolate(knots.transpose(1, 2), size=_PATH_POINTS, mode="linear", align_corners=True)
    # Round the corners of the polygon, so that it looks like handwriting.
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


LOOKS = {
    "Oo": "zero", "Q": "zero", "Il": "one", "/": "one", "Zz": "two", "ξ": "three", "}": "three",
    "Y": "four", "y": "four", "Ss": "five", "b": "six", "T": "seven", "?": "seven", "B": "eight",
    "&": "eight", "§": "eight", "q": "nine", "g": "nine",
}  # fmt: skip
"""Names of the digits that some glyphs of the pool resemble, by a string of such glyphs."""


class Captioner:
    """Writes a random caption for each picture of the pool; tokens of captions are cached by their text."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self._names = class_names()
        self._looks = [LOOKS.get(c) for c in (*LETTERS, *SYMBOLS)] + [None] * NUM_SCRIBBLES
        self._made: dict[str, Tensor] = {}

    def __call__(self, labels: Tensor, kinds: Tensor) -> Tensor:
        """Tokens of one caption for each picture, shape (n, CONTEXT).

        Args:
            labels: Classes of the pool, shape (n,).
            kinds: Kind of the background, an index into STYLES, shape (n,).
        """
        numbers = self.rng.random((len(labels), 3))
        texts = [
            self._caption(label, kind, triple)
            for label, kind, triple in zip(labels.tolist(), kinds.tolist(), numbers, strict=True)
        ]
        for text in texts:
            if text not in self._made:
                self._made[text] = tokenize([text])[0]
        return torch.stack([self._made[text] for text in texts])

    def _caption(self, label: int, kind: int, uniform: np.ndarray) -> str:
        """A caption that three random numbers in [0, 1) choose: its subject, template and style."""
        look = self._looks[label]
        style = STYLES[kind]
        subject = f"{look} shape" if look and uniform[0] < 1 / 3 else self._names[label]
        text = TEMPLATES[int(uniform[1] * len(TEMPLATES))].format(subject)
        return f"{text}, {style}" if style and uniform[2] < 1 / 2 else text
