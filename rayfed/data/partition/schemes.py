"""The schemes that distribute the samples of one domain to its clients, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from rayfed.data.config import DataConfig
from rayfed.data.partition.dealing import (
    Indices,
    deal_by_dirichlet,
    deal_by_quantity,
    deal_classes,
    deal_evenly,
    deal_shards,
)
from rayfed.data.partition.sizes import smallest_part, too_many
from rayfed.data.partition_config import PartitionConfig
from rayfed.errors import ConfigError, count_of

Deal = Callable[[NDArray[np.int64], int, int, PartitionConfig, np.random.Generator], list[Indices]]
"""Labels, number of parts, smallest size of a part, config and generator; returns the positions of each part.

Raises ValueError where the samples do not give such parts.
"""

DEALS: Mapping[str, Deal] = {
    "by_domain": lambda labels, parts, smallest, config, rng: deal_evenly(len(labels), parts, rng),
    "dirichlet": lambda labels, parts, smallest, config, rng: deal_by_dirichlet(
        labels, parts, config.alpha, smallest, rng
    ),
    "pathological": lambda labels, parts, smallest, config, rng: deal_classes(
        labels, parts, config.classes_per_client, rng
    ),
    "shards": lambda labels, parts, smallest, config, rng: deal_shards(
        labels, parts, config.shards_per_client, rng
    ),
    "quantity": lambda labels, parts, smallest, config, rng: deal_by_quantity(
        len(labels), parts, config.alpha, smallest, rng
    ),
}
"""What distributes the samples of a domain, by scheme; `imbalanced` and `natural` look at all domains."""

FILLED = ("dirichlet", "quantity")
"""Schemes that give every client `min_samples` training samples; the others give it at least one."""


def deal(
    name: str, labels: NDArray[np.int64], count: int, config: DataConfig, rng: np.random.Generator
) -> list[Indices]:
    """Distribute the samples of a domain to its clients.

    Args:
        name: Name of the domain, for messages.
        labels: Class of each sample of the domain, shape (n,).
        count: Number of clients.
        config: The config section `data`.
        rng: Generator of the draws.

    Returns:
        Positions of the samples of each client, int64.

    Raises:
        ConfigError: The samples are too few, or cannot be distributed as the scheme says.
    """
    partition = config.partition
    num_train = partition.min_samples if partition.scheme in FILLED else 1
    smallest = smallest_part(config, num_train, len(labels))
    if len(labels) < count * smallest:
        raise ConfigError(too_many(config, name, count, len(labels), smallest))
    try:
        parts = DEALS[partition.scheme](labels, count, smallest, partition, rng)
    except ValueError as err:
        raise ConfigError(_unfit(name, count, partition, str(err))) from err
    if (fewest := min(map(len, parts))) < smallest:
        why = f"a client would have {fewest} samples and needs {smallest}"
        raise ConfigError(_unfit(name, count, partition, why))
    return parts


EACH = {"pathological": "classes_per_client", "shards": "shards_per_client"}
"""Key of `data.partition` that says how much each client gets, of the schemes that have one."""


def _unfit(name: str, count: int, partition: PartitionConfig, why: str) -> str:
    keys = [f"data.partition.{key}" for key in (EACH.get(partition.scheme), "clients_per_domain") if key]
    return (
        f"data.partition.scheme: {partition.scheme} does not fit domain {name!r} with "
        f"{count_of(count, 'client')}: {why}; lower {' or '.join(keys)}, or use more samples of the domain "
        "(data.limit)"
    )
