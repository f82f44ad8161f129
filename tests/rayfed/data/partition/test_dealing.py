import numpy as np
import pytest
import torch

from rayfed.data.partition import dealing
from rayfed.data.partition.dealing import (
    deal_by_dirichlet,
    deal_by_inner_dirichlet,
    deal_by_quantity,
    deal_classes,
    deal_evenly,
    deal_in_proportion,
    deal_shards,
    growing_shares,
    stratified_order,
)
from rayfed.seeds import generator
from tests.rounding import near


def test_sizes_under_the_cap_are_as_the_spec_says():
    # With balanced classes the smallest client has 0.165 to 0.20 of a domain, the largest 0.205 on average.
    labels = np.repeat(np.arange(100), 20)
    sizes = []
    for seed in range(20):
        parts = deal_by_dirichlet(labels, 5, 0.5, 10, generator(seed))
        sizes.append(sorted(len(p) / len(labels) for p in parts))
    assert min(s[0] for s in sizes) > 0.15
    assert abs(np.mean([s[-1] for s in sizes]) - 0.205) < 0.005


def test_one_class_only_is_repaired():
    # One class is one draw; with alpha 0.01 one part takes nearly all of it in each of the 100 tries.
    parts = deal_by_dirichlet(np.zeros(50, dtype=np.int64), 5, 0.01, 10, generator(0))
    assert [len(p) for p in parts] == [10] * 5
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(50))


def test_tiny_alpha_and_many_parts():
    labels = np.arange(1000) % 3
    parts = deal_by_dirichlet(labels, 100, 1e-4, 10, generator(0))
    assert [len(p) for p in parts] == [10] * 100
    with pytest.raises(ValueError, match="1000 samples"):
        deal_by_dirichlet(labels, 101, 1e-4, 10, generator(0))


def test_even_deal_and_stratified_order_are_permutations():
    parts = deal_evenly(10, 3, generator(0))
    assert sorted(map(len, parts)) == [3, 3, 4]
    assert sorted(np.concatenate(parts)) == list(range(10))
    strata = np.array([0] * 90 + [1] * 9 + [2])
    order = stratified_order(strata, generator(1))
    assert sorted(order) == list(range(100))
    for length in (20, 50, 80):
        assert abs((strata[order[:length]] == 1).sum() - 0.09 * length) <= 1
        assert abs((strata[order[:length]] == 0).sum() - 0.9 * length) <= 2


@pytest.mark.slow
@pytest.mark.steady
def test_large_domains_take_a_bounded_number_of_draws(monkeypatch):
    labels, draw, drawn = np.arange(60_000) % 345, dealing._draw_parts, []
    monkeypatch.setattr(dealing, "_draw_parts", lambda *args: drawn.append(0) or draw(*args))
    # Only equal parts satisfy the smallest size, so all draws fail and the best one is repaired.
    parts = deal_by_dirichlet(labels, 5, 0.001, 12_000, generator(0))
    assert [len(part) for part in parts] == [12_000] * 5
    assert len(drawn) == dealing.MAX_TRIES


class Fixed:
    """A generator whose shares are given and whose order is that of the numbers."""

    def __init__(self, shares):
        self.shares = shares

    def dirichlet(self, alpha):
        assert len(alpha) == len(self.shares)
        return np.array(self.shares)

    def permutation(self, what):
        return np.arange(what) if isinstance(what, int) else np.array(what)


def test_two_classes_each_divide_every_class_between_its_two_clients():
    labels = np.tile(np.arange(4), 6)  # six samples of each of four classes
    for seed in range(20):
        parts = deal_classes(labels, 4, 2, generator(seed))
        counts = np.array([np.bincount(labels[part], minlength=4) for part in parts])
        assert sorted(counts.ravel()) == [0] * 8 + [3] * 8
        assert (counts > 0).sum(axis=0).tolist() == [2] * 4  # every class has two clients
        assert (counts > 0).sum(axis=1).tolist() == [2] * 4
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(24))


def test_classes_are_dealt_in_turn():
    # Classes 0 and 1 to part 0, then 2 and the first of those that one part has: 0.
    parts = deal_classes(np.array([0, 1, 2, 0, 1, 2]), 2, 2, Fixed([]))
    assert [part.tolist() for part in parts] == [[0, 1, 4], [3, 2, 5]]
    with pytest.raises(ValueError, match="2 classes, fewer than 3"):
        deal_classes(np.array([0, 1]), 1, 3, generator(0))
    with pytest.raises(ValueError, match="1 samples for 2 clients"):
        deal_classes(np.array([0, 1]), 2, 2, generator(0))


def test_shards_are_equal_pieces_of_the_sorted_samples():
    parts = deal_shards(np.array([1, 0, 1, 0, 2, 2, 0]), 2, 2, Fixed([]))
    # Sorted: 1 3 6 (class 0), 0 2 (class 1), 4 5 (class 2); shards [1 3] [6 0] [2 4] [5].
    assert [part.tolist() for part in parts] == [[1, 3, 6, 0], [2, 4, 5]]
    labels = np.arange(600) % 10  # McMahan's: 100 clients, 2 shards, here of 3 samples
    parts = deal_shards(labels, 100, 2, generator(0))
    assert {len(part) for part in parts} == {6}
    assert {len(np.unique(labels[part])) for part in parts} == {1, 2}
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(600))
    with pytest.raises(ValueError, match="3 samples do not fill 4 shards"):
        deal_shards(np.zeros(3, dtype=np.int64), 2, 2, generator(0))


def test_quantity_skew_follows_the_shares_and_fills_small_parts():
    # 8, 4, 2, 2 of 16; the two small ones get one each of the largest.
    parts = deal_by_quantity(16, 4, 0.5, 3, Fixed([0.5, 0.25, 0.125, 0.125]))
    assert [part.tolist() for part in parts] == [[*range(6)], [*range(6, 10)], [10, 11, 12], [13, 14, 15]]
    sizes = [len(part) for part in deal_by_quantity(1000, 5, 0.5, 1, generator(3))]
    shares = generator(3).dirichlet([0.5] * 5)
    assert np.abs(np.array(sizes) - 1000 * shares).max() < 2
    with pytest.raises(ValueError, match="5 samples cannot give 2 clients 3 each"):
        deal_by_quantity(5, 2, 1.0, 3, generator(0))


@pytest.mark.parametrize(
    ("growth", "wanted"),
    [
        ("linear", [1 / 10, 2 / 10, 3 / 10, 4 / 10]),
        ("square", [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        ("exponential", np.exp([1, 2, 3, 4]) / np.exp([1, 2, 3, 4]).sum()),
    ],
)
def test_sizes_grow_with_the_number_of_the_part(growth, wanted):
    shares = growing_shares(growth, 4)
    near(shares, np.asarray(wanted), 8, precision=torch.float64)
    parts = deal_in_proportion(6000, shares, 1, generator(0))
    assert np.abs(np.array([len(part) for part in parts]) - 6000 * np.array(wanted)).max() <= 1
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(6000))
    filled = [
        len(part) for part in deal_in_proportion(100, growing_shares("exponential", 6), 9, generator(0))
    ]
    assert min(filled) == 9
    assert sum(filled) == 100
    assert np.isfinite(growing_shares("exponential", 5000)).all()


def test_inner_dirichlet_gives_equal_sizes_and_each_part_shares_of_its_own():
    labels = np.repeat(np.arange(5), [400, 300, 200, 100, 3])
    for alpha in (0.05, 0.5, 100.0):
        parts = deal_by_inner_dirichlet(labels, 7, alpha, generator(1))
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
    shares = generator(1).dirichlet(np.full(3, 2.0), size=2)

    # Plenty of each class: the first draws follow the shares of the part.
    plenty = np.repeat(np.arange(3), 30_000)
    first = deal_by_inner_dirichlet(plenty, 2, 2.0, OnlyFirst(shares, 4000))
    found = np.array([np.bincount(plenty[part[:2000]], minlength=3) / 2000 for part in first])
    assert np.abs(found - shares).max() < 0.05


class OnlyFirst:
    """A generator with given class shares."""

    def __init__(self, shares, seed):
        self.shares, self.rng = shares, generator(seed)

    def dirichlet(self, alpha, size):
        assert np.array_equal(alpha, np.full(3, 2.0))
        assert size == 2
        return self.shares

    def __getattr__(self, name):
        return getattr(self.rng, name)
