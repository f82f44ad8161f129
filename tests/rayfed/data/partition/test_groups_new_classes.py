"""The clients of one partition get the test samples of another one."""

from dataclasses import replace

import numpy as np

from rayfed.data.partition.groups import only_tests, with_tests_of
from rayfed.data.partition.make import MIXED
from rayfed.data.partition.partition import ClientSplit, Partition
from tests.rayfed.data.partition.toy import config, part


def split(id, domain, train, test=()):
    rows = (np.array(own, dtype=np.int64) for own in (train, (), test))
    return ClientSplit(id=id, domain=domain, **dict(zip(("train", "val", "test"), rows, strict=True)))


def listed(*clients, **others):
    return Partition(clients=clients, held_out={}, official_test=False, pooled=False, **others)


def test_clients_share_the_tests_of_their_domain_and_keep_their_ids_and_order():
    trained = listed(
        split("c0-a", "a", [1]),
        split("c1-a", "a", [2]),
        split("c2-a", "a", [3]),
        split("c3-a", "a", [4]),
        split("c4-b", "b", [5]),
        split("c5-mixed", MIXED, [6]),
        unseen=frozenset({"c1-a"}),
    )
    tests = listed(split("c0-a", "a", [10, 11, 12], [20, 21]), split("c1-b", "b", [13], [22]))
    found = with_tests_of(trained, tests)
    assert [(c.id, c.domain, c.train.tolist(), c.test.tolist()) for c in found.clients] == [
        ("c0-a", "a", [10], [20, 21]),
        ("c1-a", "a", [11], [20, 21]),
        ("c2-a", "a", [12], [20, 21]),
        ("c3-a", "a", [10], [20, 21]),
        ("c4-b", "b", [13], [22]),
        ("c5-mixed", MIXED, [10, 11, 12, 13], [20, 21, 22]),
    ]
    assert found.unseen == {"c1-a"}
    assert found.official_test
    assert not found.pooled


def test_the_only_client_of_each_domain_is_the_same_as_without_them():
    tests = part(only_tests(config(test=0.25)))
    found = with_tests_of(part(config(test=0.25)), tests)
    assert replace(found, official_test=False).digest == tests.digest
