"""Numbers of clients of a domain, sizes of their splits, and messages about domains with too few samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rayfed.data.config import DataConfig
from rayfed.data.imbalance import imbalanced_counts
from rayfed.data.partition.dealing import Indices
from rayfed.data.partition_config import PartitionConfig
from rayfed.errors import ConfigError


def client_counts(config: DataConfig, owners: Sequence[str]) -> list[int]:
    """Number of clients of each domain.

    Args:
        config: The config section `data`.
        owners: The domains that have clients, in the order of the clients.

    Raises:
        ConfigError: `clients_per_domain` is a list with another number of entries, or a population has fewer
            clients than there are domains.
    """
    partition = config.partition
    if config.population is not None:
        return _population_counts(config.population.clients, partition, owners)
    if partition.scheme == "imbalanced":
        return imbalanced_counts(len(owners), partition.factor)
    counts = partition.clients_per_domain
    if isinstance(counts, int):
        return [counts] * len(owners)
    if len(counts) != len(owners):
        raise ConfigError(
            f"data.partition.clients_per_domain: {len(counts)} numbers {counts} for {len(owners)} domains "
            f"({', '.join(owners)}); give one number each, or one for all"
        )
    return list(counts)


def _population_counts(total: int, partition: PartitionConfig, owners: Sequence[str]) -> list[int]:
    """Number of clients of each domain of a population: about the same, unless they are to be imbalanced."""
    if total < len(owners):
        raise ConfigError(
            f"data.population: {total} clients cannot cover {len(owners)} domains ({', '.join(owners)}); "
            f"give at least one for each, or choose data.domains"
        )
    if partition.scheme == "imbalanced":
        return imbalanced_counts(len(owners), partition.factor, total)
    each, rest = divmod(total, len(owners))
    return [each + (i < rest) for i in range(len(owners))]


def shares_test(config: DataConfig) -> bool:
    """Whether the clients of a domain share its test samples."""
    return separates_test(config) and not config.partition.split_test


def separates_test(config: DataConfig) -> bool:
    """Whether the test samples of a domain are separated before the others are distributed."""
    by_domain = config.partition.scheme == "imbalanced" or config.population is not None
    return config.test == "official" or by_domain


def split_sizes(config: DataConfig, sizes: Indices) -> tuple[Indices, Indices]:
    """Numbers of test and validation samples of clients of these sizes; a fraction > 0 gives at least one."""

    def count(share: float | int) -> Indices:
        if isinstance(share, int):
            return np.full_like(sizes, share)
        return np.maximum(np.floor(share * sizes + 0.5), float(share > 0)).astype(np.int64)

    test = config.test if isinstance(config.test, int | float) and not separates_test(config) else 0
    return count(test), count(config.val)


def smallest_part(config: DataConfig, num_train: int, num_samples: int) -> int:
    """The smallest size from which on a client keeps `num_train` training samples.

    It is larger than `num_samples` if no client of up to this size does.
    """
    sizes = np.arange(num_samples + 1)
    test, val = split_sizes(config, sizes)
    # One more than the last size that is too small. A smaller size may be enough, because two numbers are
    # rounded and both may increase at the same size.
    return int(np.flatnonzero(sizes - test - val < num_train)[-1]) + 1


def too_many(config: DataConfig, name: str, count: int, num_samples: int, smallest: int) -> str:
    """The message for a domain that has too many clients, with `smallest` the samples that a client needs."""
    clients = "1 client does" if count == 1 else f"{count} clients do"
    if fits := num_samples // smallest:
        advice = f"set at most {fits} for this domain"
        if config.partition.scheme == "dirichlet":
            advice += ", or lower data.partition.min_samples"
    else:
        advice = "lower data.val, data.test or data.partition.min_samples, or use more samples of the domain"
        advice += "" if config.limit is None else " (data.limit)"
    return (
        f"data.partition.clients_per_domain: {clients} not fit in domain {name!r} with its {num_samples} "
        f"samples to deal; a client needs {smallest} (scheme={config.partition.scheme}, val={config.val}, "
        f"test={config.test}); {advice}"
    )


def no_tests(config: DataConfig, name: str) -> str:
    """The message for a domain without test samples for its clients to share."""
    if config.test != "official":
        return (
            f"data.test: {config.test} leaves domain {name!r} without test samples; "
            "set data.test to a larger fraction, e.g. 0.2"
        )
    return (
        f"data.test: official, but domain {name!r} has no official test split; "
        "set data.test to a fraction, e.g. 0.2"
    )


def too_few(config: DataConfig, name: str, count: int, pool: int, smallest: int) -> str:
    """The message for a domain whose `factor` leaves `pool` samples for `count` clients."""
    return (
        f"data.partition.factor: {config.partition.factor} gives domain {name!r} {count} clients but only "
        f"{pool} samples, and a client needs {smallest}; lower the factor or data.val, or raise data.limit"
    )
