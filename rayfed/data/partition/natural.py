"""Natural clients: a column of the data says whose samples they are."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rayfed.data.config import DataConfig
from rayfed.data.partition.dealing import Indices
from rayfed.data.partition.from_file import Imported
from rayfed.data.partition.sizes import smallest_part
from rayfed.errors import ConfigError

log = logging.getLogger(__name__)


def by_client(
    owners: Sequence[str], chosen: Indices, test: NDArray[np.bool_], config: DataConfig
) -> Imported:
    """The samples of every natural client, in the order of the names of the clients.

    Clients that would have fewer than `min_samples` training samples are left out, which is logged.

    Args:
        owners: Name of the client of each sample of the data set, N names; empty: the data set has none.
        chosen: Indices of the samples to use, ascending.
        test: Whether a sample is in the official test split, bool, shape (N,); with `data.test=official`
            these samples belong to no client.
        config: The config section `data`.

    Raises:
        ConfigError: The data set does not name clients, or all of them are too small.
    """
    if not len(owners):
        raise ConfigError(
            f"data.partition.scheme: natural needs a data set that names the client of each sample, and "
            f"{config.name} does not; set data.columns.client where the reader has columns (data=hf/NAME), "
            f"or list the samples of each client in data.partition.file"
        )
    official = config.test == "official"
    tests = chosen[test[chosen]] if official else np.empty(0, dtype=np.int64)
    own = np.setdiff1d(chosen, tests)
    names, which, sizes = np.unique(
        np.asarray(owners, dtype=np.str_)[own], return_inverse=True, return_counts=True
    )
    wanted = config.partition.min_samples
    smallest = smallest_part(config, wanted, int(sizes.max(initial=0)))
    large = np.flatnonzero(sizes >= smallest)
    if not len(large):
        raise ConfigError(
            f"data.partition.min_samples: {wanted}, but no client of {config.name} has so many training "
            f"samples; the largest has {sizes.max(initial=0)} samples in all: lower it"
        )
    if fewer := len(names) - len(large):
        log.warning(
            "data.partition.min_samples: %d of %d clients have fewer than %d training samples and are left "
            "out; lower it to keep them",
            *(fewer, len(names), wanted),
        )
    order = np.argsort(which, kind="stable")
    ends = np.cumsum(sizes)
    parts = {str(names[i]): {"all": own[order[ends[i] - sizes[i] : ends[i]]]} for i in large.tolist()}
    return Imported(clients=parts, shared_tests=tests)
