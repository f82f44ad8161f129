"""Partition data by groups, such as the slices of a patient, so that no group is in two splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rayfed.data.config import DataConfig
from rayfed.data.partition.dealing import Indices
from rayfed.data.partition.make import make_partition
from rayfed.data.partition.partition import Partition
from rayfed.data.partition.population import Population, VirtualPartition
from rayfed.data.partition.shots import keep_shots
from rayfed.data.partition.unseen import hold_back
from rayfed.data.shards import Dataset


def partition_of(dataset: Dataset, config: DataConfig, seed: int) -> Partition:
    """Partition a data set by samples, or by groups if it has groups and `by_group` is set.

    With `data.shots`, every client then keeps a few training samples of each class only; with
    `data.unseen_clients`, some clients never train.

    Args:
        dataset: The prepared data set.
        config: The config section `data`.
        seed: Seed of the experiment.

    Raises:
        ConfigError: The data cannot be partitioned as the config asks, see `make_partition`.
    """
    whole = _whole(dataset, config, seed)
    if isinstance(config.shots, int):
        whole = keep_shots(whole, dataset.labels, config.shots, seed)
    if isinstance(config.unseen_clients, int | float) and config.unseen_clients:
        whole = hold_back(whole, config.unseen_clients, seed)
    return whole


def _whole(dataset: Dataset, config: DataConfig, seed: int) -> Partition:
    """The partition in which clients have all of their samples."""
    labels = dataset.labels
    domain = dataset.domain
    test = dataset.test
    if config.partition.file:
        return make_partition(labels, domain, test, dataset.domains, config, seed, dataset.keys)
    owners = dataset.owners if config.partition.scheme == "natural" else []
    if not (dataset.grouped and config.partition.by_group):
        return make_partition(labels, domain, test, dataset.domains, config, seed, owners)
    groups = groups_of(dataset.keys)
    first = np.array([members[0] for members in groups])
    owners = [owners[sample] for sample in first] if owners else []
    dealt = make_partition(labels[first], domain[first], test[first], dataset.domains, config, seed, owners)
    return _expanded(dealt, groups, labels, config, seed)


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


def _expanded(
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
