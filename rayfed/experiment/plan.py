"""Prepares and checks one experiment before anything is written, and finds the runs of a protocol."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rayfed.config.look_up import design_of
from rayfed.config.schema import Config, Request
from rayfed.config.variants import PROTOCOLS
from rayfed.data.data_config import DataConfig
from rayfed.data.shards import Dataset
from rayfed.engine.built_once import Memo
from rayfed.engine.client_places import check_resources
from rayfed.engine.setup import Setup, dataset_of, prepare
from rayfed.executors.cluster_config import ClusterConfig


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked experiment.

    Attributes:
        config: Its config.
        path: Its folder.
        setup: The prepared experiment.
    """

    config: Config
    path: Path
    setup: Setup

    def on(self, cluster: ClusterConfig) -> Plan:
        """The same experiment with another section `cluster`, such as its part of a cluster."""
        config = replace(self.config, cluster=cluster)
        return replace(self, config=config, setup=replace(self.setup, design=design_of(config)))


def prepared(config: Config, shared: Memo | None = None) -> Setup:
    """The experiment of a config, ready to run anywhere. Arguments and errors: as of `prepare`."""
    return prepare(design_of(config), shared)


def make_plan(config: Config, path: Path, shared: Memo | None = None) -> Plan:
    """Prepare an experiment; nothing is written to `path`.

    Args:
        shared: What was made for other experiments of the command.

    Raises:
        ConfigError: It cannot be run.
    """
    setup = prepared(config, shared)
    check_resources(config.cluster, setup, path, config.checkpoint.keep + 1)
    return Plan(config=config, path=path, setup=setup)


def first_run(config: Request) -> Config:
    """The experiment itself, or the first run of its protocol.

    Raises:
        ConfigError: The protocol has no runs on these data.
    """
    if config.protocol not in PROTOCOLS:
        return config.alone()
    return next(iter(protocol_runs(config, Memo()).values()))


def protocol_runs(config: Request, shared: Memo) -> dict[str, Config]:
    """The runs of a protocol by name.

    Args:
        config: The experiment, whose protocol is not `single`.
        shared: What was made for other experiments.

    Raises:
        ConfigError: The protocol has no runs on these data.
    """

    def open_data(data: DataConfig) -> Dataset:
        return dataset_of(design_of(replace(config, data=data)), shared)

    return PROTOCOLS[config.protocol].parts(config.alone(), open_data)
