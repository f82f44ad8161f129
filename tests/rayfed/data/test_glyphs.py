from __future__ import annotations

import itertools
import unicodedata

import numpy as np
import pytest
import torch

from benchmarks.glyph_pool import SYMBOL_FONTS, GlyphPool, PoolStyle
from rayfed.data import glyphs as d
from rayfed.data.glyphs import (
    CANVAS,
    GlyphJitter,
    colour_pairs,
    font_file,
    luma,
    render,
    strip,
    warp,
)
from rayfed.errors import DataError
from rayfed.models.captions import LETTERS, SYMBOLS
from tests.rounding import near


@pytest.fixture(scope="module")
def five() -> d.Embedded:
    return d.build()


@pytest.fixture(scope="module")
def pool() -> GlyphPool:
    return GlyphPool()


def grey(five: d.Embedded, domain: str, test: bool) -> tuple[np.ndarray, np.ndarray]:
    """Brightness in 8 x 8 cells, (n, 64), and labels of one split of a domain."""
    rows = (five.domain == d.DOMAINS.index(domain)) & (five.test == test)
    cells = five.images[rows].astype(np.float64).mean(axis=3).reshape(-1, 8, 4, 8, 4).mean(axis=(2, 4))
    return cells.reshape(len(cells), -1) / 255, five.labels[rows]


def test_build_is_the_same_twice(five):
    again = d.build()
    for name in ("images", "labels", "domain", "test"):
        assert np.array_equal(getattr(five, name), getattr(again, name))
    assert five.keys == again.keys


def test_shapes_and_keys(five):
    n = len(five.labels)
    assert five.images.shape == (n, 32, 32, 3)
    assert five.images.dtype == np.uint8
    assert five.labels.dtype == five.domain.dtype == np.int64
    assert five.test.dtype == bool
    assert five.domain.shape == five.test.shape == (n,)
    assert five.domains == ("plain", "inverted", "blended", "street", "fonts")
    assert len(set(five.keys)) == len(five.keys) == n
    assert all(key.startswith(f"{five.domains[k]}/") for key, k in zip(five.keys, five.domain, strict=True))
    assert np.all(np.diff(five.domain) >= 0)


def test_every_handwriting_sample_is_in_one_domain_and_one_split(five):
    samples = [int(key.rpartition("-")[2]) for key in five.keys if "handwriting" in key]
    assert sorted(samples) == list(range(1797))


def test_handwriting_keeps_its_label(five):
    from sklearn.datasets import load_digits

    target = load_digits().target
    rows = [i for i, key in enumerate(five.keys) if "handwriting" in key]
    assert [target[int(five.keys[i].rpartition("-")[2])] for i in rows] == five.labels[rows].tolist()


@pytest.mark.parametrize("domain", range(5))
def test_classes_are_balanced(five, domain):
    mine = five.domain == domain
    assert np.bincount(five.labels[mine & five.test], minlength=10).tolist() == [15] * 10
    train = np.bincount(five.labels[mine & ~five.test], minlength=10)
    # 174 to 183 samples of a class in thirds, less 15 for the test split: 43 to 46
    assert train.min() >= 43
    assert train.max() <= 46


def test_no_two_images_are_equal(five):
    flat = five.images.reshape(len(five.images), -1)
    assert len(np.unique(flat, axis=0)) == len(flat)


def test_domains_look_different(five):
    by_domain = [five.images[five.domain == k].astype(np.float64) for k in range(5)]
    spread = [(images.max(axis=3) - images.min(axis=3)).mean() for images in by_domain]
    assert spread[0] == 0  # plain is grey
    assert min(spread[1:]) > 5
    border = [np.concatenate([i[:, :2], i[:, -2:]], axis=1).mean() for i in by_domain]
    middle = [i[:, 12:20, 12:20].mean() for i in by_domain]
    assert border[0] == 0
    assert middle[1] < border[1] - 20  # inverted: dark ink on light paper
    # street alone has ink on both sides: its left and right edges change more from top to bottom than those
    # of other rendered digits
    edges = [np.abs(np.diff(i[:, 8:24, [0, 1, 30, 31]].mean(axis=3), axis=1)).mean() for i in by_domain]
    assert edges[3] > 1.5 * edges[4]


def test_digits_are_readable_and_domains_shift(five):
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(max_iter=500).fit(*grey(five, "plain", test=False))
    scores = {domain: model.score(*grey(five, domain, test=True)) for domain in d.DOMAINS}
    assert scores["plain"] > 0.85
    assert max(scores[domain] for domain in d.DOMAINS if domain != "plain") < 0.6


def test_a_missing_font_is_named():
    with pytest.raises(DataError, match="NoSuchFont"):
        font_file("NoSuchFont")


def test_warp_without_jitter_only_shrinks():
    mask = torch.zeros(1, CANVAS, CANVAS)
    mask[:, 12:36, 18:30] = 1  # 48 pixels to 32: rows 8 to 24, columns 12 to 20
    out = warp(mask, GlyphJitter(), np.random.default_rng(0))[0]
    expected = torch.zeros(32, 32)
    expected[8:24, 12:20] = 1
    near(out, expected, 6, size=CANVAS)  # coordinates of pixels; values change by at most 1 per pixel


def test_warp_shows_the_middle_of_a_strip():
    mask = torch.rand(2, CANVAS, CANVAS, generator=torch.Generator().manual_seed(0))
    row = strip(torch.zeros_like(mask), mask, torch.zeros_like(mask))
    rng = np.random.default_rng(0)
    near(warp(row, GlyphJitter(), rng), warp(mask, GlyphJitter(), rng), 6, size=row.shape[-1])


def test_colour_pairs_keep_their_contrast():
    ink, paper = colour_pairs(2000, (0.3, 0.6), np.random.default_rng(0))
    gap = (luma(paper) - luma(ink)).numpy()
    # channels that saturate move the brightness: most, not all, stay in the interval
    assert np.mean((gap > 0.25) & (gap < 0.65)) > 0.8
    assert gap.min() > 0


def test_pool_has_no_digit(pool):
    characters = {*"".join(LETTERS), *SYMBOLS}
    assert not [c for c in characters if unicodedata.numeric(c, None) is not None]
    assert len(set(pool.classes)) == len(pool.classes)


def test_pool_glyphs_exist_in_their_fonts():
    # A font without a character draws its box of a missing glyph: all such masks would be equal.
    for font in SYMBOL_FONTS:
        masks = render([*SYMBOLS, "\u0378"], font)  # the last is no character at all
        assert masks[:-1].flatten(1).sum(1).min() > 5
        for a, b in itertools.combinations(range(len(masks)), 2):
            assert not torch.equal(masks[a], masks[b]), (font, SYMBOLS[a])


def test_pool_batches_follow_the_generator(pool):
    a, b, c = (pool.batch(16, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
    assert not torch.equal(a[0], c[0])
    assert a[0].shape == (16, 3, 32, 32)
    assert a[0].min() >= 0
    assert a[0].max() <= 1


def test_pool_styles_show_photographs_and_neighbours(pool):
    flat = PoolStyle(jitter=GlyphJitter(), coarse=0, neighbours=0, photo=0, black=1, blur=(0, 0), grain=0)
    for style, sees in ((flat, False), (PoolStyle(**{**vars(flat), "black": 0, "photo": 1.0}), True)):
        images = pool.batch(32, np.random.default_rng(0), style)[0]
        assert bool((images.std(dim=1) > 0.02).float().mean() > 0.1) == sees
    alone = pool.batch(64, np.random.default_rng(0), flat)[0]
    crowd = pool.batch(64, np.random.default_rng(0), PoolStyle(**{**vars(flat), "neighbours": 1.0}))[0]
    assert crowd[..., [0, -1]].mean() > 10 * alone[..., [0, -1]].mean() + 0.01


@pytest.mark.slow
@pytest.mark.steady
def test_pool_classes_are_told_apart(pool):
    # The mean of each class's easy pictures is closest to new pictures of that class, for most of them.
    style, rng = PoolStyle().eased(0.0), np.random.default_rng(0)
    images, labels = pool.batch(6000, rng, style)
    flat = images[:, 0].flatten(1)
    means = torch.stack([flat[labels == k].mean(0) for k in range(len(pool.classes))])
    fresh, truth = pool.batch(1000, rng, style)
    nearest = torch.cdist(fresh[:, 0].flatten(1), means).argmin(1)
    assert (nearest == truth).float().mean() > 0.5
    assert torch.equal(images[:, 0], images[:, 1])  # grey


def test_eased_ends_at_the_full_style():
    assert PoolStyle().eased(1.0).black == pytest.approx(PoolStyle().black)
    assert PoolStyle().eased(1.0).jitter == PoolStyle().jitter
    assert PoolStyle().eased(0.0).jitter == GlyphJitter()


def test_max_classes_limits_the_labels():
    small = GlyphPool(max_classes=3)
    assert set(small.batch(64, np.random.default_rng(0))[1].tolist()) == {0, 1, 2}
