"""Domain imbalance: the counts and sizes of FedGCR's specification (V11), and what becomes of small data."""

from itertools import chain

import numpy as np
import pytest

from rayfed.config.schema import load_config
from rayfed.data.data_config import DataConfig, PartitionConfig, check_config
from rayfed.data.partition.dealing import (
    dealt_sizes,
    imbalanced_counts,
    pool_sizes,
    ratio_of,
    with_minimum,
)
from rayfed.data.partition.make import make_partition
from rayfed.errors import ConfigError
from tests.vectors import vector

V11 = vector("fedgcr", "V11")
V12 = vector("fedgcr", "V12")


@pytest.mark.parametrize(
    ("case", "counts", "ratio"),
    zip(V11.inputs["counts"], V11.expected["counts"], V11.expected["ratio"], strict=True),
)
def test_v11_counts(case, counts, ratio):
    found = imbalanced_counts(case["domains"], case["factor"])
    assert found == counts
    assert sum(found) == case["total"]
    assert ratio_of(case["domains"], case["factor"]) == ratio


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


@pytest.mark.parametrize("case", range(len(V11.inputs["splits"])))
def test_v11_sizes(case):
    """Training samples of every client, domain by domain, of a partition without a validation part."""
    split = V11.inputs["splits"][case]
    available = split["available"]
    counts = imbalanced_counts(len(available), split["factor"])
    assert counts == V11.expected["clients"][case]
    assert pool_sizes(available, ratio_of(len(available), split["factor"])) == V11.expected["pools"][case]
    sizes = [len(client.train) for client in dealt(split).clients]
    found = [sizes[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(len(counts))]
    assert found == V11.expected["samples"][case]
    assert sum(sizes) == V11.expected["totals"][case]


def dealt(split, **more):
    """The partition of domains with these numbers of training samples and one test sample each."""
    names = [f"d{i}" for i in range(len(split["available"]))]
    domain = np.repeat(np.arange(len(names)), np.array(split["available"]) + 1)
    is_test = np.r_[True, domain[1:] != domain[:-1]]
    options = PartitionConfig(
        scheme="imbalanced", factor=split["factor"], within=split["within"], pool_share=split["share"], **more
    )
    config = DataConfig(name="x", reader="x", test="official", val=0, partition=options)
    return make_partition(np.arange(len(domain)) % 10, domain, is_test, names, config, 0)


SIZES = {
    "digits": dict.fromkeys(("mnist", "usps", "synthdigits", "mnist_m", "svhn"), (7438, 1860)),
    "domainnet": dict.fromkeys(
        ("clipart", "real", "painting", "sketch", "quickdraw", "infograph"), (6081, 0)
    ),
    "pacs": {"photo": (1670, 0), "art_painting": (2048, 0), "cartoon": (2344, 0), "sketch": (3929, 0)},
}
"""Training and official test images of each domain; of two data sets at least as many as published."""

PRESETS = [
    *((table, setting) for table in ("table1", "table2", "table6") for setting in ("dif1", "dif5", "dif10")),
    ("table7", "domainnet"),
]


@pytest.mark.parametrize(("case", "preset"), enumerate(PRESETS))
def test_the_presets_have_the_images_of_the_authors_runs(case, preset):
    """The config of a table as it is composed, through the partition of a run."""
    table, setting = preset
    config = load_config([f"experiment=fedgcr/{table}", f"setting={setting}"]).data
    sizes = SIZES[config.name]
    names = list(config.domains or sizes)
    assert names == list(sizes)
    parts = [np.arange(sum(sizes[name])) >= sizes[name][0] for name in names]
    domain = np.repeat(np.arange(len(names)), [len(part) for part in parts])
    found = make_partition(np.arange(len(domain)) % 10, domain, np.concatenate(parts), names, config, 0)
    assert [len(client.train) for client in found.clients] == [*chain(*V11.expected["samples"][case])]
    assert sum(len(client.train) for client in found.clients) == V11.expected["totals"][case]
    assert not any(len(client.val) for client in found.clients)


def test_the_first_pool_decides_those_of_all_domains():
    """Floor of 0.3 of 4864, 3040, 1900; the last domain has fewer than its 570, and gives all it has."""
    assert dealt_sizes([9000, 9000, 400], 1.6, 4864, 0.3) == [1459, 912, 400]
    assert dealt_sizes([9000, 9000, 400], 1.0, 1859, 0.8) == [1487, 1487, 400]
    assert dealt_sizes([100, 90], 2.0, None, 1.0) == [100, 50]


def test_a_partition_takes_its_samples_from_the_pool():
    """Half of a pool of 200 in each domain, for two clients as 1 : 3; without it, half of the smallest."""
    split = {"available": [900, 400], "factor": 1, "within": "ratio", "share": 0.5}
    for pool, sizes in ((200, [25, 75]), (None, [50, 150])):
        found = [len(client.train) for client in dealt(split, pool_size=pool).clients]
        assert found == sizes * 2


@pytest.mark.parametrize("wrong", [{"pool_size": 0}, {"pool_share": 0}, {"pool_share": 1.5}])
def test_a_pool_that_cannot_be(wrong):
    partition = PartitionConfig(scheme="imbalanced", **wrong)
    with pytest.raises(ConfigError, match=r"data\.partition\.pool_"):
        check_config(DataConfig(name="x", reader="x", partition=partition))


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

    accuracy = np.array(V12.inputs["domain_accuracy"]) / 100
    counts = V12.inputs["clients_per_domain"]
    scores = [Score(value=a, loss=1.0, num=100) for a in accuracy]
    clients = [score for score, count in zip(scores, counts, strict=True) for _ in range(count)]
    row = summary(
        Evaluation(
            clients=dict(enumerate(clients)), domains=dict(zip("abcde", scores, strict=True)), held_out={}
        )
    )
    for key, name in (
        ("accuracy_domain", "mean_over_domains"),
        ("accuracy", "mean_over_clients"),
        ("sigma_type", "sigma_type"),
        ("sigma_client", "sigma_client"),
    ):
        V12.matches(100 * row[key], V12.expected[name])
    V12.matches(np.std(V12.inputs["domain_accuracy"], ddof=1), V12.expected["not_sigma_type"])


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
