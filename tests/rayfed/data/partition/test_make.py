import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from rayfed.errors import ConfigError
from tests.conftest import ROOT
from tests.rayfed.data.partition.toy import DOMAINS, config, make_data, part

EVERY = [
    config(),
    config(clients=5),
    config(clients=[1, 2, 3, 4], val=0, test=0.5),
    config(clients=3, val=2, test=5),
    config("dirichlet", 5),
    config("dirichlet", 5, alpha=0.01, min_samples=5),
    config("dirichlet", 3, alpha=100.0, limit=60),
    config(clients=2, domains=["sketch", "art"], held_out="photo"),
    config(held_out=["cartoon"], limit=30, pooled=True),
]


@pytest.mark.parametrize("cfg", EVERY)
def test_parts_are_disjoint_and_complete(cfg):
    domain = make_data()[1]
    result = part(cfg)
    arrays = [getattr(c, s) for c in result.clients for s in ("train", "val", "test")]
    arrays += list(result.held_out.values())
    together = np.concatenate(arrays)
    assert len(np.unique(together)) == len(together)
    assert all(array.dtype == np.int64 and (np.diff(array) > 0).all() for array in arrays)
    assert all(len(client.train) > 0 for client in result.clients)
    chosen = set(cfg.domains or DOMAINS) | set(result.held_out)
    for name in DOMAINS:
        size = int((domain == DOMAINS.index(name)).sum())
        expected = min(size, cfg.limit or size) if name in chosen else 0
        assert (domain[together] == DOMAINS.index(name)).sum() == expected
    for client in result.clients:
        for split in (client.train, client.val, client.test):
            assert (domain[split] == DOMAINS.index(client.domain)).all()


@pytest.mark.parametrize("cfg", [replace(c, test="official") for c in EVERY])
def test_official_test_is_shared_and_never_trained_on(cfg):
    labels, domain, test = make_data(num_test=40)
    result = part(cfg, (labels, domain, test))
    for client in result.clients:
        assert test[client.test].all()
        assert not test[client.train].any()
        assert not test[client.val].any()
        assert (domain[client.test] == DOMAINS.index(client.domain)).all()
        if cfg.limit is None:
            assert len(client.test) == 40
    own = np.concatenate([a for c in result.clients for a in (c.train, c.val)])
    assert len(np.unique(own)) == len(own)
    if cfg.limit is None:
        owners = [DOMAINS.index(c.domain) for c in result.clients]
        assert len(own) == (np.isin(domain, owners) & ~test).sum()


@pytest.mark.parametrize("cfg", EVERY)
def test_seed_decides_everything(cfg):
    assert part(cfg, seed=3).digest == part(cfg, seed=3).digest
    assert part(cfg, seed=3).digest != part(cfg, seed=4).digest


def test_digest_is_pinned():
    """Only integers are shuffled and dealt here, so every machine has this digest.

    A change of it changes every published result: raise it in the changelog.
    """
    assert part(config()).digest[:16] == "ad71c521aeb046e4"


@pytest.mark.slow
@pytest.mark.steady
def test_another_process_deals_the_same_by_dirichlet():
    """Draws of a Dirichlet distribution are floating-point numbers: compared on one machine only."""
    program = "from tests.rayfed.data.partition.toy import *; print(part(config('dirichlet', 5)).digest)"
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == part(config("dirichlet", 5)).digest


@pytest.mark.parametrize("cfg", [config(clients=3), config("dirichlet", 4), config(clients=2, limit=50)])
def test_another_domain_changes_nobody_elses_part(cfg):
    labels, domain, test = make_data()
    before = part(cfg)
    # The new domain comes first, as a folder "aaa" would: all indices move by its size.
    labels2 = np.concatenate([np.zeros(80, dtype=np.int64), labels])
    domain2 = np.concatenate([np.zeros(80, dtype=np.int64), domain + 1])
    after = part(cfg, (labels2, domain2, np.concatenate([np.zeros(80, dtype=bool), test])), ("aaa", *DOMAINS))
    theirs = [client for client in after.clients if client.domain != "aaa"]
    for old, new in zip(before.clients, theirs, strict=True):
        assert old.domain == new.domain
        for split in ("train", "val", "test"):
            assert np.array_equal(getattr(old, split) + 80, getattr(new, split))
    fewer = part(replace(cfg, domains=["sketch", "cartoon"]))
    for name in ("sketch", "cartoon"):
        old = [c.train for c in before.clients if c.domain == name]
        new = [c.train for c in fewer.clients if c.domain == name]
        assert all(map(np.array_equal, old, new))


def test_ids_sort_as_clients_and_follow_the_order_of_domains():
    result = part(config(clients=[1, 9, 1, 1], domains=["sketch", "art", "photo", "cartoon"]))
    ids = [client.id for client in result.clients]
    assert ids[:3] == ["c00-sketch", "c01-art", "c02-art"]
    assert ids[-2:] == ["c10-photo", "c11-cartoon"]
    assert ids == sorted(ids)
    assert part(config()).clients[3].id == "c3-sketch"


def test_fractions_and_counts():
    # art has 200 samples: 0.2 and 0.1 of them are 40 and 20.
    first = part(config()).clients[0]
    assert (len(first.train), len(first.val), len(first.test)) == (140, 20, 40)
    first = part(config(val=7, test=0)).clients[0]
    assert (len(first.train), len(first.val), len(first.test)) == (193, 7, 0)
    # A fraction that rounds to nothing still gives one: 120 / 40 = 3 samples, of which 0.1 is 0.3.
    small = part(config(clients=[1, 1, 40, 1], test=0.1, val=0.1)).clients[2]
    assert (len(small.train), len(small.val), len(small.test)) == (1, 1, 1)


def test_splits_are_stratified():
    labels, _, _ = make_data()
    for client in part(config(val=0.25, test=0.25)).clients:
        for split in (client.val, client.test):
            counts = np.bincount(labels[split], minlength=7)
            assert counts.max() - counts.min() <= 2


def test_limit_is_stratified_by_class_and_test():
    labels, domain, test = make_data(num_test=50)
    result = part(config(limit=70, test="official"), (labels, domain, test))
    for client in result.clients:
        size = int((domain == DOMAINS.index(client.domain)).sum())
        assert len(client.train) + len(client.val) + len(client.test) == 70
        assert abs(len(client.test) - 70 * 50 / size) <= 4
        counts = np.bincount(labels[np.concatenate([client.train, client.val, client.test])], minlength=7)
        assert counts.max() - counts.min() <= 3


def test_by_domain_parts_are_nearly_equal():
    sizes = [len(c.train) + len(c.val) + len(c.test) for c in part(config(clients=7)).clients]
    assert max(sizes[:7]) - min(sizes[:7]) <= 1
    assert sum(sizes[:7]) == 200


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.5, 100.0])
@pytest.mark.parametrize("min_samples", [1, 10, 15])
def test_dirichlet_leaves_enough_to_train_on(alpha, min_samples):
    result = part(config("dirichlet", 5, alpha=alpha, min_samples=min_samples, test="official"))
    assert min(len(client.train) for client in result.clients) >= min_samples


def test_dirichlet_at_the_limit_gives_equal_parts():
    # 100 samples to deal, 5 clients of 20: only one way of sizes, reached by repair.
    data = make_data(sizes=(100,) * 4, num_test=0)
    result = part(config("dirichlet", 5, alpha=0.01, min_samples=20, val=0, test=0), data)
    assert [len(client.train) for client in result.clients] == [20] * 20


def test_small_alpha_is_skewed_and_large_alpha_is_not():
    labels, _, _ = data = make_data(sizes=(700,) * 4)

    def top_share(alpha):
        clients = part(config("dirichlet", 5, alpha=alpha, min_samples=1), data).clients
        return np.mean([np.bincount(labels[c.train]).max() / len(c.train) for c in clients])

    assert top_share(100.0) < 0.25
    assert top_share(0.1) > 0.4


def test_domain_tests():
    result = part(config(clients=3))
    tests = result.domain_tests()
    assert list(tests) == list(DOMAINS)
    own = np.sort(np.concatenate([c.test for c in result.clients if c.domain == "photo"]))
    assert np.array_equal(tests["photo"], own)
    official = part(config(clients=3, test="official")).domain_tests()
    assert np.array_equal(official["art"], np.arange(180, 200))


def test_pooled_holds_everything():
    separate, pooled = part(config(clients=2)), part(config(clients=2, pooled=True))
    assert separate.trainers is separate.clients
    assert pooled.digest == separate.digest  # the clients, hence the tests, are the same
    (only,) = pooled.trainers
    assert only.id == "pooled"
    for split in ("train", "val", "test"):
        union = np.sort(np.concatenate([getattr(c, split) for c in separate.clients]))
        assert np.array_equal(getattr(only, split), union)


def test_held_out_domain_has_no_client():
    domain = make_data()[1]
    result = part(config(held_out="photo"))
    assert [c.domain for c in result.clients] == ["art", "cartoon", "sketch"]
    assert np.array_equal(result.held_out["photo"], np.flatnonzero(domain == 2))


BAD = [
    (config(domains=["art", "sketches"]), ["data.domains", "'sketches'", "did you mean 'sketch'?"]),
    (config(held_out="fotos"), ["data.held_out", "'fotos'", "did you mean 'photo'?"]),
    (config(domains=["art", "art"]), ["data.domains", "'art' is listed twice"]),
    (config(domains=["art"], held_out="art"), ["data.held_out", "no domain for clients"]),
    (config(clients=[1, 2]), ["clients_per_domain", "2 numbers", "4 domains"]),
    (config(clients=[1, 2, 0, 1]), ["clients_per_domain", "at least 1"]),
    (config(clients=121, val=0, test=0), ["clients_per_domain", "'photo'", "120 samples", "at most 120"]),
    (config("dirichlet", 7, val=0, test=0, min_samples=20), ["'photo'", "needs 20", "at most 6"]),
    (config("dirichlet", 1, min_samples=500), ["1 client does", "'art'", "lower data.val"]),
    (config(val=200), ["clients_per_domain", "'art'", "val=200"]),
    (config(val=1.5), ["data.val", "1.5"]),
    (config(val=-1), ["data.val", "-1"]),
    (config(test=True), ["data.test", "True", "official"]),
    (config(val=0.5, test=0.5), ["data.val + data.test", "below 1"]),
    (config(limit=0), ["data.limit", "0"]),
    (config("dirichlet", alpha=0.0), ["data.partition.alpha", "0.0"]),
    (config("dirichlet", min_samples=0), ["data.partition.min_samples", "0"]),
    (config("dirichlit"), ["data.partition.scheme", "did you mean 'dirichlet'?"]),
]


@pytest.mark.parametrize(("cfg", "words"), BAD)
def test_bad_configs_are_explained_in_one_line(cfg, words):
    with pytest.raises(ConfigError) as error:
        part(cfg)
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_no_official_test_set():
    with pytest.raises(ConfigError, match=r"data\.test: official, .*'art'.*set data\.test to a fraction"):
        part(config(test="official"), make_data(num_test=0))


def test_no_test_samples_for_the_clients_of_a_domain_to_share():
    with pytest.raises(ConfigError, match=r"data\.test: 0\.001 leaves domain 'art' without test samples"):
        part(config("imbalanced", test=0.001))


def test_what_is_said_to_fit_does_fit():
    # 12 of photo's 120 samples: 2 for testing, 1 for validation, 9 to train on.
    with pytest.raises(ConfigError, match=r"a client needs 12 .*at most 10 for this domain"):
        part(config("dirichlet", [1, 1, 11, 1], min_samples=9))
    result = part(config("dirichlet", [1, 1, 10, 1], min_samples=9))
    assert min(len(c.train) for c in result.clients) >= 9


def test_clients_keep_a_share_of_what_the_smallest_one_trains_on():
    """Of 140, 70, 105 and 280 examples in 7 classes, 70 % of 70: seven of each class for everybody."""
    data = make_data((140, 70, 105, 280))
    whole, cut = (part(config(val=0, test=0.0, share_of_smallest=share), data) for share in (None, 0.7))
    assert [len(client.train) for client in whole.clients] == [140, 70, 105, 280]
    for client in cut.clients:
        assert np.bincount(data[0][client.train]).tolist() == [7] * 7
    split = part(config(share_of_smallest=0.05), data)
    assert [len(client.train) for client in split.clients] == [2] * 4  # 5 % of 49
    assert [len(client.test) for client in split.clients] == [28, 14, 21, 56]
    with pytest.raises(ConfigError, match="share_of_smallest"):
        part(config(share_of_smallest=1.5))
