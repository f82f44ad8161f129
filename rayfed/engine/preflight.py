"""Checks, before anything starts, that the actors fit on the cluster and the files fit on the disk."""

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


def check_resources(cluster: ClusterConfig, setup: Setup, path: Path, checkpoints: int = 0) -> None:
    """Refuse an experiment that cannot fit, before any actor starts.

    If the run starts Ray itself, the actors are compared with the resources of this machine. If it joins a
    cluster, `rayfed.engine.session` makes this comparison once it is connected, before it starts an actor.

    Args:
        cluster: The section `cluster` of the config.
        setup: The checked experiment.
        path: Folder of the run.
        checkpoints: Largest number of checkpoints in the folder at the same time, including the one that is
            being written.

    Raises:
        ResourceError: The machine cannot hold the actors; says what would fit.
        ConfigError: The disk cannot hold what the run will write.
    """
    if cluster.executor == "ray":
        from rayfed.executors.cluster import own_node
        from rayfed.executors.connection import is_our_own

        if is_our_own(cluster.address):
            plan_actors(cluster, setup.experiment, [own_node(cluster.num_cpus, cluster.num_gpus)])
    check_disk(path, (1 + checkpoints) * num_bytes(setup.start))


def plan_actors(
    cluster: ClusterConfig,
    experiment: Experiment,
    nodes: Sequence[Mapping[str, float]],
    per_gpu: int | None = None,
    mps: bool = False,
) -> Plan:
    """Number and resources of the client actors that will be started on these nodes.

    Args:
        cluster: The section `cluster` of the config.
        experiment: The experiment, for its numbers of clients.
        nodes: Resources of every node: CPU, GPU, memory (bytes).
        per_gpu: Most actors for which a GPU has memory; None: this was not measured.
        mps: NVIDIA's multi-process service serves the GPUs.

    Raises:
        ResourceError: They do not fit; the message says what would.
    """
    from rayfed.executors.cluster import Wish, plan

    wish = Wish(
        actors=cluster.actors,
        cpus=cluster.cpus_per_actor,
        gpus=cluster.gpus_per_actor,
        memory=cluster.memory_per_actor * GB,
        per_gpu=per_gpu,
        mps=mps,
    )
    return plan(wish, len(experiment.clients), experiment.clients_per_round, nodes)


def check_disk(path: Path, num_bytes: float) -> None:
    """Raise ConfigError unless the disk of `path`, which need not exist yet, has `num_bytes` bytes free."""
    if (free := free_disk(path)) < num_bytes:
        raise ConfigError(
            f"output: the disk of {str(path)!r} has {free / GB:.2f} GB free, the run needs "
            f"{num_bytes / GB:.2f} GB for tensors and checkpoints; choose another folder"
        )


def free_disk(path: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist yet."""
    there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    return shutil.disk_usage(there).free
