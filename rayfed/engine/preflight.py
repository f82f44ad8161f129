"""What is checked after the input and before anything starts: room for the actors, room for the files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rayfed.config.sections import ClusterConfig
from rayfed.engine.loop import Experiment
from rayfed.engine.setup import Setup
from rayfed.errors import ConfigError
from rayfed.types import num_bytes

if TYPE_CHECKING:
    from rayfed.executors.cluster import Plan

GB = 1e9


def check(cluster: ClusterConfig, setup: Setup, path: Path, checkpoints: int = 0) -> None:
    """Refuse an experiment that cannot fit, before any actor starts; costs next to nothing.

    Actors are checked against a cluster of our own before it is started. One that is joined is asked by
    `rayfed.engine.launch` instead, which has to connect to it anyway, before it starts an actor there.

    Args:
        cluster: Where clients shall run.
        setup: The checked experiment.
        path: Folder of the run.
        checkpoints: Checkpoints that lie there at the same time, the one being written included.

    Raises:
        ResourceError: The machine cannot hold the actors; says what would fit.
        ConfigError: The disk cannot hold what the run will write.
    """
    if cluster.executor == "ray":
        from rayfed.executors.cluster import is_our_own, own_node

        if is_our_own(cluster.address):
            fit(cluster, setup.experiment, [own_node(cluster.num_cpus, cluster.num_gpus)])
    check_disk(path, (1 + checkpoints) * num_bytes(setup.start))


def fit(cluster: ClusterConfig, experiment: Experiment, nodes: Sequence[Mapping[str, float]]) -> Plan:
    """The actors that will be started on these nodes.

    Raises:
        ResourceError: They do not fit; says what would.
    """
    from rayfed.executors.cluster import Wish, plan

    wish = Wish(
        actors=cluster.actors,
        cpus=cluster.cpus_per_actor,
        gpus=cluster.gpus_per_actor,
        memory=cluster.memory_per_actor * GB,
    )
    return plan(wish, len(experiment.clients), experiment.clients_per_round, nodes)


def check_disk(path: Path, num_bytes: float) -> None:
    """Raise ConfigError unless the disk of `path`, which need not exist yet, has this much room."""
    if (free := free_disk(path)) < num_bytes:
        raise ConfigError(
            f"output: the disk of {str(path)!r} has {free / GB:.2f} GB free, the run needs "
            f"{num_bytes / GB:.2f} GB for tensors and checkpoints; choose another folder"
        )


def free_disk(path: Path) -> int:
    """Bytes free where a folder is or would be."""
    there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    return shutil.disk_usage(there).free
