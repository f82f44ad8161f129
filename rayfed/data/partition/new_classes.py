"""The clients of an experiment, tested on classes of which none of them has a sample."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from rayfed.data.config import DataConfig
from rayfed.data.partition.make import MIXED
from rayfed.data.partition.partition import SPLITS, ClientSplit, Partition, union
from rayfed.data.partition_config import PartitionConfig


def only_tests(config: DataConfig) -> DataConfig:
    """The section `data` in which only the test samples count: one client has all samples of a domain."""
    return replace(
        config,
        partition=PartitionConfig(),
        population=None,
        shots=None,
        unseen_clients=None,
        val=0,
        augment=None,
    )


def with_tests_of(trained: Partition, tests: Partition) -> Partition:
    """The clients of one partition with the test samples that their domains have in another one.

    The clients of a domain share its test samples. One whose samples are of several domains has those of all.
    Its training samples are dealt to them in turn; nobody trains on them.

    Args:
        trained: The clients, which are listed one by one.
        tests: The other one, with one client for each domain (`only_tests`).
    """
    mixed = {split: union([getattr(client, split) for client in tests.clients]) for split in SPLITS}
    of_domain = {MIXED: ClientSplit(id=MIXED, domain=MIXED, **mixed)}
    of_domain |= {client.domain: client for client in tests.clients}
    members = Counter(client.domain for client in trained.clients)
    dealt: Counter[str] = Counter()
    clients = []
    for client in trained.clients:
        whole = of_domain[client.domain]
        place = dealt[client.domain] % len(whole.train)  # a client has one sample or more
        clients.append(replace(whole, id=client.id, train=whole.train[place :: members[client.domain]]))
        dealt[client.domain] += 1
    return replace(tests, clients=tuple(clients), official_test=True, unseen=trained.unseen)
