"""Changes of a partition: groups kept whole, few-shot clients, unseen clients, new classes.

Of a group, such as the slices of a patient, no two examples are in different splits. A few-shot client
keeps a few training samples of every class. Unseen clients never train and are scored like the others. With
new classes, clients are tested on classes of which none of them has a sample.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rayfed.data.data_config import DataConfig
from rayfed.data.partition.dealing import Indices
from rayfed.data.partition.make import MIXED, make_partition
from rayfed.data.partition.partition import SPLITS, ClientSplit, Partition, union
from rayfed.data.partition.population import Population, VirtualPartition
from rayfed.data.partition_config import PartitionConfig
from rayfed.data.shards import Dataset
from rayfed.errors import ConfigError
from rayfed.seeds import generator

log = logging.getLogger(__name__)


def keep_shots(partition: Partition, labels: NDArray[np.int64], shots: int, seed: int) -> Partition:
    """The partition in which every client trains on at most `shots` samples of each class.

    Validation and test samples stay as they are. With the same seed, the samples of fewer shots are among
    those of more.

    Args:
        partition: The clients with all of their samples.
        labels: Class of each sample, shape (N,).
        shots: Largest number of training samples of a client and class, >= 1.
    """
    number: Counter[str] = Counter()  # of the client in its domain, so that other domains change nothing
    clients: list[ClientSplit] = []
    for client in partition.clients:
        rng = generator(seed, "shots", client.domain, number[client.domain])
        number[client.domain] += 1
        clients.append(replace(client, train=_draw_shots(client.train, labels[client.train], shots, rng)))
    return replace(partition, clients=tuple(clients))


def _draw_shots(samples: Indices, labels: NDArray[np.int64], shots: int, rng: np.random.Generator) -> Indices:
    mixed = rng.permutation(len(samples))
    kept = [mixed[labels[mixed] == label][:shots] for label in np.unique(labels)]
    return np.sort(samples[np.concatenate(kept)])


def hold_back(partition: Partition, wanted: float | int, seed: int) -> Partition:
    """The partition in which some clients, drawn uniformly from all of them, never train.

    They keep their samples. With the same seed, the unseen clients of a smaller number are among those of a
    larger one.

    Args:
        wanted: Number of unseen clients, or a share in [0, 1) of all, which is rounded and at least one
            client where it is not 0.

    Raises:
        ConfigError: No client is left to train.
    """
    total = len(partition.clients)
    count = wanted if isinstance(wanted, int) else max(int(np.floor(wanted * total + 0.5)), int(wanted > 0))
    if count >= total:
        raise ConfigError(
            f"data.unseen_clients: {wanted} of {total} clients leaves none to train; choose a smaller "
            f"number, or raise data.partition.clients_per_domain"
        )
    order = generator(seed, "unseen clients").permutation(total)
    return replace(partition, unseen=frozenset(partition.clients[i].id for i in order[:count].tolist()))


def partition_of(dataset: Dataset, config: DataConfig, seed: int) -> Partition:
    """Partition a data set by samples, or by groups if it has groups and `by_group` is set.

    With `data.shots`, every client then keeps a few training samples of each class only; with
    `data.unseen_clients`, some clients never train.

    Args:
        dataset: The prepared data set.
        seed: Seed of the experiment, which `data.seed` replaces here.

    Raises:
        ConfigError: The data cannot be partitioned as the config asks, see `make_partition`.
    """
    seed = seed if config.seed is None else config.seed
    whole = _whole(dataset, config, seed)
    if isinstance(config.shots, int):
        whole = keep_shots(whole, dataset.labels, config.shots, seed)
    if isinstance(config.unseen_clients, int | float) and config.unseen_clients:
        whole = hold_back(whole, config.unseen_clients, seed)
    _warn_of_clients(whole, dataset, config)
    return whole


def _warn_of_clients(partition: Partition, dataset: Dataset, config: DataConfig) -> None:
    """Log a warning where a column of clients is not used, or one client has all samples by default."""
    chosen = config.partition
    by_name = "client" in (config.columns or {})
    if by_name and chosen.scheme != "natural" and not chosen.file:
        log.warning(
            "data.columns.client: %r is not used under data.partition.scheme=%s; "
            "data.partition.scheme=natural makes a client of each of its values",
            *((config.columns or {})["client"], chosen.scheme),
        )
    elif (
        chosen == replace(PartitionConfig(), by_group=chosen.by_group)
        and partition.drawn is None
        and (len(partition.clients), len(dataset.domains)) == (1, 1)
    ):
        log.warning(
            "1 client: %s names none, and nothing divides its samples; set data.columns.client, or "
            "data.partition, such as data.partition.clients_per_domain=10",
            config.name,
        )


def _whole(dataset: Dataset, config: DataConfig, seed: int) -> Partition:
    """The partition in which clients have all of their samples."""
    labels = dataset.labels
    domain = dataset.domain
    test = dataset.test
    if config.partition.file:
        return make_partition(labels, domain, test, dataset.domains, config, seed, dataset.keys)
    owners = dataset.owners if config.partition.scheme == "natural" else []
    if not (dataset.grouped and config.partition.by_group):
        own = (labels, domain, test, dataset.domains, config, seed, owners)
        return make_partition(*own, splits=dataset.splits)
    groups = groups_of(dataset.keys)
    first = np.array([members[0] for members in groups])
    owners = [owners[sample] for sample in first] if owners else []
    dealt = make_partition(labels[first], domain[first], test[first], dataset.domains, config, seed, owners)
    return _expand(dealt, groups, labels, config, seed)


def groups_of(keys: Sequence[str]) -> list[Indices]:
    """Positions of the keys of each group; keys of a group differ in the part after the last slash only.

    Groups are in the order in which their first keys appear.

    >>> [group.tolist() for group in groups_of(["a/1/x", "a/2/x", "a/1/y"])]
    [[0, 2], [1]]
    """
    groups: dict[str, list[int]] = {}
    for position, key in enumerate(keys):
        groups.setdefault(key.rpartition("/")[0], []).append(position)
    return [np.array(members, dtype=np.int64) for members in groups.values()]


def _expand(
    dealt: Partition, groups: Sequence[Indices], labels: NDArray[np.int64], config: DataConfig, seed: int
) -> Partition:
    """Replace indices of groups by the indices of their samples.

    The clients of a virtual population draw samples, not groups; but no group is in two pools.
    """

    def members(chosen: Indices) -> Indices:
        empty = np.empty(0, dtype=np.int64)
        return np.sort(np.concatenate([empty, *(groups[group] for group in chosen)]))

    held_out = {name: members(chosen) for name, chosen in dealt.held_out.items()}
    if isinstance(dealt, VirtualPartition):
        domains = [domain.replaced(members, labels) for domain in dealt.clients.domains]
        return replace(dealt, clients=Population(domains, config, seed), held_out=held_out)
    clients = tuple(
        replace(c, train=members(c.train), val=members(c.val), test=members(c.test)) for c in dealt.clients
    )
    return replace(dealt, clients=clients, held_out=held_out)


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
    Its training samples are dealt to them in turn; no client trains on them.

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
