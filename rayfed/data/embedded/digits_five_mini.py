"""digits-five-mini: the ten digits in five domains, 32 x 32 colour pixels, made in about a second.

A small substitute for Digit-Five (MNIST, MNIST-M, SVHN, SynthDigits, USPS). Three domains show real
handwriting, each sample in exactly one domain and one split; two show rendered fonts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rayfed.data.embedded import styles
from rayfed.data.embedded.glyphs import TEXT_FONTS, GlyphJitter, handwriting, render, strip, warp
from rayfed.seeds import generator

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
    photos = styles.Photos()
    masks, labels = handwriting()
    shares = share_handwriting(labels)
    parts = []
    for domain in DOMAINS:
        if domain in HANDWRITTEN:
            parts.append(_handwritten(domain, masks, labels, shares[domain], photos))
        else:
            parts.append(_rendered(domain, photos))
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


def _handwritten(
    domain: str,
    masks: Tensor,
    labels: np.ndarray,
    share: tuple[np.ndarray, np.ndarray],
    photos: styles.Photos,
) -> _Part:
    samples = np.concatenate(share)
    rng = generator(_SEED, NAME, domain)
    ink = warp(masks[torch.from_numpy(samples)], GlyphJitter(), rng)
    return _Part(
        images=styles.to_uint8(_dress(domain, ink, photos, rng)),
        labels=labels[samples],
        test=np.arange(len(samples)) >= len(share[0]),
        keys=[f"{domain}/handwriting-{sample:04d}" for sample in samples],
    )


def _rendered(domain: str, photos: styles.Photos) -> _Part:
    rng = generator(_SEED, NAME, domain)
    num_test = TEST_PER_CLASS * len(CLASSES)
    num_train = RENDERED_PER_CLASS * len(CLASSES) - num_test
    labels = np.concatenate(
        [rng.permutation(np.arange(size) % len(CLASSES)) for size in (num_train, num_test)]
    ).astype(np.int64)
    ink = _house_numbers(labels, rng) if domain == "street" else _single_digits(labels, rng)
    return _Part(
        images=styles.to_uint8(_dress(domain, ink, photos, rng)),
        labels=labels,
        test=np.arange(len(labels)) >= num_train,
        keys=[f"{domain}/train-{i:04d}" for i in range(num_train)]
        + [f"{domain}/test-{i:04d}" for i in range(num_test)],
    )


def _dress(domain: str, ink: Tensor, photos: styles.Photos, rng: np.random.Generator) -> Tensor:
    """Colour masks, shape (n, SIDE, SIDE), in the style of a domain; returns (n, 3, SIDE, SIDE)."""
    n = len(ink)
    if domain == "plain":
        return styles.white_on_black(ink)
    if domain == "blended":
        return styles.difference(ink, photos.patches(n, rng))
    if domain == "inverted":
        dark, light = styles.colour_pairs(n, (0.3, 0.8), rng)
        return styles.paint(ink, dark, light)
    if domain == "street":
        front, wall = styles.swap(*styles.colour_pairs(n, (0.2, 0.6), rng), 0.5, rng)
        texture = styles.soften(photos.patches(n, rng), (1.0, 2.0), rng)
        wall_image = 0.8 * styles.gradient(wall, 0.15, rng) + 0.2 * texture
        return styles.grain(styles.soften(styles.paint(ink, front, wall_image), (0.4, 1.1), rng), 0.06, rng)
    front, paper = styles.swap(*styles.colour_pairs(n, (0.2, 0.7), rng), 0.5, rng)
    return styles.paint(ink, styles.gradient(front, 0.15, rng), styles.gradient(paper, 0.3, rng))


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
    beside = []
    for _ in range(2):
        present = torch.from_numpy(rng.random(n) < 0.75)[:, None, None]
        beside.append(masks[fonts, rng.integers(len(CLASSES), size=n)] * present)
    row = strip(beside[0], masks[fonts, labels], beside[1])
    return warp(row, GlyphJitter(rotate_deg=12, scale=(0.9, 1.3), stretch=0.3, shear=0.15, shift=0.05), rng)
