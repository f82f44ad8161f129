"""Unseen clients: some clients never train, and are scored beside the others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rayfed.data.partition.partition import Partition
from rayfed.errors import ConfigError
from rayfed.seeds import generator


def hold_back(partition: Partition, wanted: float | int, seed: int) -> Partition:
    """The partition in which some clients, drawn uniformly from all of them, never train.

    They keep their samples. With the same seed, the unseen clients of a smaller number are among those of a
    larger one.

    Args:
        partition: The clients.
        wanted: Number of unseen clients, or a share in [0, 1) of all, which is rounded and at least one
            client where it is not 0.
        seed: Seed of the experiment.

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
