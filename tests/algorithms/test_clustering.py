"""Clustering algorithms, purity and centres of groups."""

import time

import numpy as np
import pytest

from algorithms._clustering import cluster, finch, purity, reduce_exactly
from algorithms._grouping import centers
from tests.vectors import vector


def types(*counts):
    return [kind for kind, count in enumerate(counts) for _ in range(count)]


V13 = vector("fedgcr", "V13")


@pytest.mark.parametrize(
    ("grouping", "expected"), zip(V13.inputs["groupings"], V13.expected["purity"], strict=True)
)
def test_v13_purity(grouping, expected):
    clients = dict(zip(V13.inputs["domains"], V13.inputs["clients_per_domain"], strict=True))
    domains = [domain for domain, count in clients.items() for _ in range(count)]
    group_of = {domain: i for i, group in enumerate(grouping) for domain in group}
    V13.matches(purity([group_of[d] for d in domains], domains), expected)


def test_purity_where_a_domain_is_in_two_groups():
    assert purity([0] * 10 + [1] * 6 + [2] * 5 + [1], types(10, 6, 3, 2, 1)) == pytest.approx(19 / 22)


def blobs(seed, counts=(10, 6, 3, 2, 1), width=768, noise=0.3):
    rng = np.random.default_rng(seed)
    middle = rng.normal(size=(len(counts), width))
    return np.concatenate(
        [m + noise * rng.normal(size=(c, width)) for m, c in zip(middle, counts, strict=True)]
    )


@pytest.mark.parametrize("kind", ["gmm", "kmeans"])
def test_clusters_are_found_and_repeat(kind):
    h = blobs(0, (10, 6, 5, 4, 3))
    true = types(10, 6, 5, 4, 3)
    labels = cluster(h, 5, kind, 7)
    assert (labels == cluster(h, 5, kind, 7)).all()
    assert purity(cluster(h, 5, "kmeans", 7), true) == 1
    assert labels[0] == 0
    assert set(labels.tolist()) == set(range(labels.max() + 1))


@pytest.mark.parametrize("seed", range(3))
def test_the_reduced_mixture_is_the_full_one(seed):
    from sklearn.mixture import GaussianMixture

    h = blobs(seed, width=120, noise=1.0)
    full = GaussianMixture(5, random_state=seed).fit_predict(h)
    small = GaussianMixture(5, random_state=seed).fit_predict(reduce_exactly(h))
    assert {frozenset(np.flatnonzero(full == c)) for c in set(full)} == {
        frozenset(np.flatnonzero(small == c)) for c in set(small)
    }


@pytest.mark.parametrize("kind", ["gmm", "kmeans", "finch"])
def test_odd_numbers_of_clusters(kind):
    h = blobs(1, (2, 2), width=5)
    assert cluster(h[:1], 3, kind, 0).tolist() == [0]
    assert cluster(np.ones((4, 5)), 2, kind, 0).min() == 0  # all equal: any grouping, no failure
    assert cluster(h, 9, "kmeans", 0).max() == 3  # more groups than clients
    if kind != "finch":
        assert cluster(h, 1, kind, 0).tolist() == [0] * 4
        assert sorted(cluster(h, 4, kind, 0).tolist()) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="finite"):
        cluster(h * np.nan, 2, kind, 0)


def test_finch_links_first_neighbours():
    h = np.array([[1, 0], [1, 0.1], [1, 0.12], [0, 1], [0.1, 1]])
    assert finch(h).tolist() == [0, 0, 0, 1, 1]


@pytest.mark.slow
@pytest.mark.steady
def test_the_time_of_a_thousand_clients_is_not_that_of_pairs():
    seconds = []
    for many in (1, 1, 4):  # the first time loads libraries
        h = blobs(3, [many * size for size in (100, 62, 50, 25, 13)], noise=1.0)
        began = time.process_time()
        labels = cluster(h, 5, "gmm", 0)
        seconds.append(time.process_time() - began)
        assert labels.shape == (250 * many,)
    assert seconds[2] < 4 * 4**2 * seconds[1]  # four times the clients; 64 would be the cube


def test_centres_are_plain_means():
    found = centers(np.array([[1.0, 1], [3, 1], [0, 4]]), np.array([0, 0, 1]), at_least=3)
    assert found.tolist() == [[2, 1], [0, 4], [0, 0]]
