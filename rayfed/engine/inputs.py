"""What an experiment is made from: its data set, its clients, and the shape of its model without values."""

from __future__ import annotations

from dataclasses import replace

from rayfed.config.schema import Config
from rayfed.data import load
from rayfed.data.partition.groups import partition_of
from rayfed.data.partition.new_classes import only_tests, with_tests_of
from rayfed.data.partition.partition import Partition
from rayfed.data.shards import Dataset
from rayfed.engine.memory import measurable
from rayfed.engine.shared import Shared
from rayfed.models.backbone import Backbone
from rayfed.models.build import build_backbone
from rayfed.models.sharing import skeleton


def without_values(config: Config) -> Backbone:
    """The model of a config without values: it has the input size and the way of resizing."""
    return measurable(config, lambda: skeleton(lambda: build_backbone(config.model, 1, config.seed)))


def shape_of(config: Config, shared: Shared) -> Backbone:
    """The model of a config without values. Args: shared: what was made before."""
    return shared.once("shape", (config.model, config.seed), lambda: without_values(config))


def dataset_of(config: Config, shared: Shared) -> Dataset:
    """The data set of a config, prepared for its model. Args: shared: what was made before."""
    shape = shape_of(config, shared)
    where = (config.data, shape.size, shape.task, shape.resize)
    return shared.once("data", where, lambda: load(config.data, shape.size, shape.task, shape.resize))


def clients_of(config: Config, shared: Shared) -> Partition:
    """The clients of a config and their samples. With `data.base_classes`, the clients are those of that run.

    Args:
        config: The experiment.
        shared: What was made before.

    Raises:
        ConfigError: The samples cannot be distributed as the config asks.
    """
    data = config.data
    if data.base_classes is None:
        shape = shape_of(config, shared)
        key = (data, shape.size, shape.task, shape.resize, config.seed)
        return shared.once(
            "partition", key, lambda: partition_of(dataset_of(config, shared), data, config.seed)
        )
    trained, tests = (
        clients_of(replace(config, data=replace(own, base_classes=None)), shared)
        for own in (replace(data, classes=data.base_classes), only_tests(data))
    )
    return with_tests_of(trained, tests)
