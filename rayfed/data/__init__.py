"""Readers, prepared images and partitions."""

from __future__ import annotations

import logging

import numpy as np

from rayfed.data.cache import cache_folder
from rayfed.data.config import DataConfig, check, client_domains
from rayfed.data.shards import Dataset, open_dataset, prepare
from rayfed.data.source import Listing, make_source
from rayfed.errors import DataError

logger = logging.getLogger(__name__)


def load(config: DataConfig, size: int) -> Dataset:
    """Find, check, decode (once) and map the data set of a config.

    The result holds every domain of the data set, also those that `data.domains` leaves out: it is shared by
    all configs of the same data. The partition picks what is used.

    Args:
        config: Which data set.
        size: Side of the images in pixels, as the model wants them.

    Raises:
        ConfigError: Bad input; one line that says what to change.
    """
    check(config)

    def check_domains(data: Listing | Dataset) -> None:
        _check_domains(data, config)

    path = prepare(make_source(config), size, cache_folder(config), config.on_bad_image, check_domains)
    dataset = open_dataset(path)
    check_domains(dataset)  # again: the config may be another one, and skipping may have emptied a class
    if dataset.skipped:
        logger.warning("%d images of %s could not be decoded and are left out", dataset.skipped, config.name)
    return dataset


def _check_domains(data: Listing | Dataset, config: DataConfig) -> None:
    owners, held_out = client_domains(config, data.domains)
    for name in owners + held_out:
        present = np.unique(data.labels[data.domain == data.domains.index(name)])
        missing = sorted(set(range(len(data.classes))) - set(present.tolist()))
        if missing:
            names = ", ".join(data.classes[label] for label in missing)
            raise DataError(
                f"empty class: domain {name!r} of {data.name!r} has no images of {names}; "
                "add some, or remove the class folder from all domains"
            )
