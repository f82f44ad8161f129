"""Domain imbalance: the counts and sizes of FedGCR's specification (V11), and what becomes of small data."""

import numpy as np
import pytest

from rayfed.data.config import DataConfig, PartitionConfig
from rayfed.data.imbalance import (
    client_sizes,
    imbalanced_counts,
    pool_sizes,
    ratio_of,
    size_ratios,
    with_minimum,
)
from rayfed.data.partition.make import make_partition
from rayfed.errors import ConfigError

COUNTS = {
    (5, 1): [2] * 5,
    (5, 5): [5, 3, 2, 2, 1],
    (5, 10): [10, 6, 3, 2, 1],
    (6, 1): [2] * 6,
    (6, 5): [5, 4, 3, 2, 1, 1],
    (6, 10): [10, 7, 4, 3, 2, 1],
    (4, 1): [2] * 4,
    (4, 5): [5, 3, 2, 1],
    (4, 10): [10, 5, 2, 1],
}


@pytest.mark.parametrize(("setting", "expected"), COUNTS.items())
def test_v11_counts(setting, expected):
    assert imbalanced_counts(*setting) == expected


def test_other_numbers_of_domains_follow_the_formula():
    assert imbalanced_counts(3, 10) == [10, 3, 1]
    assert imbalanced_counts(3, 5) == [5, 2, 1]
    assert imbalanced_counts(1, 5) == [1]
    assert imbalanced_counts(5, 10, 22) == sorted(imbalanced_counts(5, 10, 22), reverse=True)
    assert sum(imbalanced_counts(5, 10, 22)) == 22
    assert imbalanced_counts(4, 10, 4) == [1, 1, 1, 1]
    for bad in ((0, 5), (3, 0.5), (3, float("nan"))):
        with pytest.raises(ValueError, match="factor"):
            imbalanced_counts(*bad)
    with pytest.raises(ValueError, match="clients"):
        imbalanced_counts(5, 5, 4)


USPS = [3719] * 5
DOMAINNET = [2103, 4864, 2472, 2213, 4000, 2626]
PACS = [1000, 1227, 1404, 2355]
V11 = [
    ([1859] * 5, 1, 0.8, "ratio", [[371, 1115]] * 5),
    (USPS, 5, 0.8, "ratio", [[225, 338, 507, 761, 1142], [417, 626, 939], [528, 792], [352, 528], [587]]),
    (
        USPS,
        10,
        0.8,
        "ratio",
        [
            [6, 12, 21, 38, 70, 126, 227, 409, 736, 1325],
            [40, 72, 129, 233, 420, 756],
            [151, 273, 491],
            [181, 327],
            [282],
        ],
    ),
    ([2103] * 6, 1, 0.3, "ratio", [[157, 472]] * 6),
    (
        DOMAINNET,
        5,
        0.6,
        "ratio",
        [[115, 161, 225, 316, 442], [126, 177, 248, 348], [147, 206, 289], [191, 267], [327], [234]],
    ),
    (
        DOMAINNET,
        10,
        0.6,
        "ratio",
        [
            [6, 11, 17, 28, 45, 72, 116, 186, 298, 477],
            [18, 29, 46, 74, 119, 191, 306],
            [53, 85, 136, 217],
            [59, 95, 152],
            [73, 118],
            [120],
        ],
    ),
    (PACS, 1, 0.6, "factor", [[150, 450]] * 4),
    (PACS, 5, 0.6, "factor", [[45, 68, 102, 153, 229], [42, 95, 213], [34, 172], [121]]),
    (
        PACS,
        10,
        0.6,
        "factor",
        [[14, 18, 24, 31, 40, 52, 68, 88, 113, 146], [12, 22, 40, 72, 128], [11, 115], [58]],
    ),
    (
        [4864] * 6,
        10,
        0.3,
        "ratio",
        [
            [8, 12, 20, 32, 52, 84, 134, 215, 345, 552],
            [21, 33, 54, 86, 138, 222, 355],
            [61, 98, 157, 252],
            [68, 110, 176],
            [85, 136],
            [138],
        ],
    ),
]


@pytest.mark.parametrize(("available", "factor", "share", "within", "expected"), V11)
def test_v11_sizes(available, factor, share, within, expected):
    counts = imbalanced_counts(len(available), factor)
    ratio = ratio_of(len(available), factor)
    used = pool_sizes(available, ratio)
    # The authors keep a share of each pool for training; ours cuts validation off each client instead.
    parts = [int(share * pool) for pool in used]
    found = [
        client_sizes(*each) for each in zip(parts, counts, size_ratios(counts, ratio, within), strict=True)
    ]
    assert found == expected


def test_no_client_goes_empty():
    assert with_minimum([0, 0, 5, 20], 2) == [2, 2, 5, 16]
    with pytest.raises(ValueError, match="3 samples"):
        with_minimum([1, 1, 1], 2)


def partition(factor, test=0.2, per_domain=400, order=None, within="ratio", val=0.1, seed=0):
    names = ("a", "b", "c", "d", "e")
    labels = np.tile(np.arange(10), 5 * per_domain // 10)
    domain = np.repeat(np.arange(5), per_domain)
    is_test = np.arange(len(labels)) % 10 == 3
    config = DataConfig(
        name="x",
        reader="x",
        test=test,
        val=val,
        partition=PartitionConfig(scheme="imbalanced", factor=factor, order=order, within=within),
    )
    return make_partition(labels, domain, is_test, names, config, seed)


@pytest.mark.parametrize("factor", [1, 5, 10])
@pytest.mark.parametrize("test", ["official", 0.2])
def test_parts_are_disjoint_and_tests_are_the_domains(factor, test):
    parts = partition(factor, test)
    counts = imbalanced_counts(5, factor)
    assert [sum(c.domain == name for c in parts.clients) for name in "abcde"] == counts
    dealt = np.concatenate([np.concatenate((c.train, c.val)) for c in parts.clients])
    assert len(np.unique(dealt)) == len(dealt)
    assert min(len(c.train) for c in parts.clients) >= 1
    for client in parts.clients:
        assert len(np.intersect1d(client.test, dealt)) == 0
        assert len(client.test) == (40 if test == "official" else 80)
    assert parts.digest == partition(factor, test).digest
    assert parts.digest != partition(factor, test, seed=1).digest


def test_order_says_which_domain_is_largest():
    parts = partition(5, order=["c", "a", "e", "b", "d"])
    counts = {name: sum(c.domain == name for c in parts.clients) for name in "abcde"}
    assert counts == {"c": 5, "a": 3, "e": 2, "b": 2, "d": 1}
    assert parts.clients[0].domain == "c"
    with pytest.raises(ConfigError, match=r"data\.partition\.order"):
        partition(5, order=["a", "b"])


def test_too_little_data_is_explained():
    with pytest.raises(ConfigError, match=r"data\.partition\.factor: 10.*lower the factor"):
        partition(10, per_domain=20)
    with pytest.raises(ConfigError, match=r"data\.partition\.factor: 0\.5"):
        partition(0.5)


def test_v12_statistics():
    from rayfed.evaluation.metrics import Evaluation, Score, summary

    accuracy = [0.946, 0.9462, 0.8858, 0.7289, 0.6571]
    scores = [Score(value=a, loss=1.0, num=100) for a in accuracy]
    clients = [score for score, count in zip(scores, COUNTS[5, 10], strict=True) for _ in range(count)]
    row = summary(
        Evaluation(
            clients=dict(enumerate(clients)), domains=dict(zip("abcde", scores, strict=True)), held_out={}
        )
    )
    found = [100 * row[key] for key in ("accuracy_domain", "accuracy", "sigma_type", "sigma_client")]
    np.testing.assert_allclose(found, [83.28, 90.497727, 11.844703, 8.300531], atol=1e-6)


@pytest.mark.parametrize(
    ("domains", "factor", "total", "counts"),
    [
        (5, 5, 13, [5, 3, 2, 2, 1]),  # the paper's own totals give the paper's own counts
        (5, 10, 22, [10, 6, 3, 2, 1]),
        (6, 10, 27, [10, 7, 4, 3, 2, 1]),
        (5, 5, 26, [10, 7, 4, 3, 2]),  # twice as many: 9.98, 6.65, 4.43, 2.96, 1.97
        (5, 10, 5, [1, 1, 1, 1, 1]),
        (4, 1, 8, [2, 2, 2, 2]),
    ],
)
def test_a_total_is_shared_out_in_proportion(domains, factor, total, counts):
    found = imbalanced_counts(domains, factor, total)
    assert sum(found) == total
    assert found == counts
