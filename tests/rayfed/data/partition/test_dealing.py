import time

import numpy as np
import pytest

from rayfed.data.partition.dealing import deal_by_dirichlet, deal_evenly, stratified_order
from rayfed.seeds import generator


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


def test_large_domains_take_bounded_time():
    labels = np.arange(60_000) % 345
    began = time.perf_counter()
    # Only equal parts satisfy the smallest size, so all draws fail and the best one is repaired.
    deal_by_dirichlet(labels, 5, 0.001, 12_000, generator(0))
    assert time.perf_counter() - began < 20
