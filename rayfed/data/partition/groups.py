"""Samples that belong together, such as the slices of a patient: dealt as a whole, so that no split leaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rayfed.data.config import DataConfig
from rayfed.data.partition.dealing import Indices
from rayfed.data.partition.make import Partition, make_partition
from rayfed.data.shards import Dataset


def partition_of(dataset: Dataset, config: DataConfig, seed: int) -> Partition:
    """Deal a data set: sample by sample, or group by group where it has groups and the config keeps them.

    Raises:
        ConfigError: See `make_partition`.
    """
    labels, domain, test = dataset.labels, dataset.domain, dataset.test
    if config.partition.file:
        return make_partition(labels, domain, test, dataset.domains, config, seed, dataset.keys)
    if not (dataset.grouped and config.partition.by_group):
        return make_partition(labels, domain, test, dataset.domains, config, seed)
    groups = groups_of(dataset.keys)
    first = np.array([members[0] for members in groups])
    dealt = make_partition(labels[first], domain[first], test[first], dataset.domains, config, seed)
    return _spread(dealt, groups)


def groups_of(keys: Sequence[str]) -> list[Indices]:
    """Places of the keys that differ in their last part only, group by group in order of appearance.

    >>> [group.tolist() for group in groups_of(["a/1/x", "a/2/x", "a/1/y"])]
    [[0, 2], [1]]
    """
    found: dict[str, list[int]] = {}
    for place, key in enumerate(keys):
        found.setdefault(key.rpartition("/")[0], []).append(place)
    return [np.array(members, dtype=np.int64) for members in found.values()]


def _spread(dealt: Partition, groups: Sequence[Indices]) -> Partition:
    def members(chosen: Indices) -> Indices:
        empty = np.empty(0, dtype=np.int64)
        return np.sort(np.concatenate([empty, *(groups[group] for group in chosen)]))

    clients = tuple(
        replace(c, train=members(c.train), val=members(c.val), test=members(c.test)) for c in dealt.clients
    )
    held_out = {name: members(chosen) for name, chosen in dealt.held_out.items()}
    return replace(dealt, clients=clients, held_out=held_out)
