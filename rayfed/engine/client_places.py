"""Decides where the clients of an experiment run: on which device, and how many actors a GPU holds.

A GPU holds as many actors as its memory does, which one client tells that runs there first. Clients of a
small network stay on the CPU. An experiment that fits nowhere is refused, and so is one whose files the disk
cannot hold.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rayfed.devices import HOST, USABLE, chosen_device
from rayfed.engine.count_cost import count_cost
from rayfed.engine.loop import RoundPlan
from rayfed.engine.measure_client import Measurement, measured_on_gpu
from rayfed.engine.setup import Setup
from rayfed.errors import BusyError, ConfigError
from rayfed.executors.cluster_config import ClusterConfig
from rayfed.federation.train_config import TrainConfig
from rayfed.mps import CLIENTS
from rayfed.terminal.console import size, stage
from rayfed.types import num_bytes

if TYPE_CHECKING:
    from rayfed.executors.cluster import ActorPlan
    from rayfed.executors.connection import Health

GB = 1e9


def check_resources(cluster: ClusterConfig, setup: Setup, path: Path, checkpoints: int = 0) -> None:
    """Refuse an experiment that cannot fit, before any actor starts.

    If the run starts Ray itself, the actors are compared with the resources of this machine. If it joins a
    cluster, `rayfed.engine.session` makes this comparison once it is connected, before it starts an actor.

    Args:
        cluster: The section `cluster` of the config.
        checkpoints: Largest number of checkpoints in the folder at the same time, including the one that is
            being written.

    Raises:
        ResourceError: The machine cannot hold the actors; says what would fit.
        ConfigError: The disk cannot hold what the run will write, or `train` needs a GPU.
    """
    if setup.design.executor.needs_cluster:
        from rayfed.executors.cluster import own_node
        from rayfed.executors.connection import is_our_own

        if is_our_own(cluster.address):
            nodes = [own_node(cluster.num_cpus, cluster.num_gpus)]
            gpus = plan_actors(cluster, setup.experiment, nodes).gpus
            if needs_gpu(setup.context.train):
                small = is_measured(cluster, nodes) and bool(too_small(setup, cluster))
                check_gpu(setup.context.train, gpus > 0 and not small)
    elif needs_gpu(setup.context.train):
        inline_device(setup, cluster)
    check_disk(path, (1 + checkpoints) * num_bytes(setup.start))


def plan_actors(
    cluster: ClusterConfig,
    experiment: RoundPlan,
    nodes: Sequence[Mapping[str, float]],
    per_gpu: int | None = None,
    mps: bool = False,
) -> ActorPlan:
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
    from rayfed.executors.connection import address_of

    wish = Wish(
        actors=cluster.actors,
        cpus=cluster.cpus_per_actor,
        gpus=cluster.gpus_per_actor,
        memory=cluster.memory_per_actor * GB,
        per_gpu=per_gpu,
        mps=mps,
        joined=address_of(cluster.address) != "local",
    )
    return plan(wish, len(experiment.clients), experiment.clients_per_round, nodes)


def check_disk(path: Path, num_bytes: float) -> None:
    """Raise ConfigError unless the disk of `path`, which need not exist yet, has `num_bytes` bytes free."""
    if (free := free_disk(path)) < num_bytes:
        raise ConfigError(
            f"output: the disk of {str(path)!r} has {size(free)} free, the run needs {size(num_bytes)} for "
            f"tensors and checkpoints; choose another folder"
        )


def free_disk(path: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist yet."""
    there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    return shutil.disk_usage(there).free


WORTH = 1e9
"""Operations of an example, forward and backward, from which on a GPU pays; an estimate.

A GPU takes about as long to be told of an operation as to compute a million numbers of it, so that actors on
the cores of a CPU are faster with a network of less work (vit_mini: 5e7; ViT-B/16: 7e10)."""


def actors_on(gpu_bytes: float, actor_bytes: float, mps: bool = False) -> int:
    """Number of client actors that the memory of a GPU holds.

    Args:
        gpu_bytes: Memory of the GPU in bytes that other users leave free.
        actor_bytes: Memory in bytes that an actor takes of it (`Measurement.device_bytes`).
        mps: NVIDIA's multi-process service serves the GPU, which limits the number of processes.

    >>> actors_on(80e9, 12e9), actors_on(8e9, 12e9), actors_on(80e9, 1e9, mps=True)
    (6, 0, 48)
    """
    held = int(USABLE * gpu_bytes / actor_bytes)
    return min(held, CLIENTS) if mps else held


class GpuPlans:
    """Plans the client actors of a command; the first run that finds a GPU measures how many one holds.

    Attributes:
        sentence: What was measured, or why the GPUs are not used, for the user; empty: no GPU was seen; None:
            not tried yet.
    """

    def __init__(self) -> None:
        self.sentence: str | None = None
        self._per_gpu: int | None = None
        self._on_cpu = False
        self._busy = False
        self._mps = False

    def plan(
        self, setup: Setup, cluster: ClusterConfig, weights: Callable[[], Any], health: Health
    ) -> ActorPlan:
        """Number and resources of the client actors of an experiment on the nodes of Ray.

        Args:
            cluster: The section `cluster` of the config.
            weights: Gives the object reference of the initial tensors.
            health: Watch on the processes of Ray.

        Raises:
            ConfigError: `train` needs a GPU, and the actors get none.
            ResourceError: The actors do not fit; the message says what would.
            RayFedError: The measured client failed.
        """
        plan = self._plan(setup, cluster, weights, health)
        check_gpu(setup.context.train, plan.gpus > 0)
        return plan

    def _plan(
        self, setup: Setup, cluster: ClusterConfig, weights: Callable[[], Any], health: Health
    ) -> ActorPlan:
        from rayfed.executors.cluster import TOGETHER, node_resources

        nodes = node_resources()
        if not is_measured(cluster, nodes):
            return plan_actors(cluster, setup.experiment, nodes)
        if self.sentence is None and (small := too_small(setup, cluster)):
            self.sentence, self._on_cpu = small, True
        if self._on_cpu:
            return plan_actors(replace(cluster, gpus_per_actor=0), setup.experiment, nodes)
        if self.sentence is None:
            stage("running the largest client on a GPU, to plan its share")
            self.sentence = ""
            try:
                found = measured_on_gpu(setup, weights(), cluster, health)
            except BusyError:
                found = None
                self._busy = True
                self.sentence = (
                    f"no whole GPU became free within {cluster.connect_timeout:g} s, so the memory of a "
                    f"client was not measured: each actor gets half of a GPU; cluster.gpus_per_actor sets "
                    f"another share"
                )
            if found:
                measured, self._mps = found
                self._per_gpu = max(1, actors_on(measured.device_free, measured.device_bytes, self._mps))
                self.sentence = on_gpu(measured, self._mps, self._per_gpu)
        if self._busy:
            cluster = replace(cluster, gpus_per_actor=1 / TOGETHER)
        return plan_actors(cluster, setup.experiment, nodes, self._per_gpu, self._mps)


def needs_gpu(train: TrainConfig) -> bool:
    """Whether clients can be trained so on a GPU only."""
    return train.graphs is True or train.base_bits is not None


def check_gpu(train: TrainConfig, has_gpu: bool) -> None:
    """Check that clients run on a GPU if their passes are recorded or their weights have four bits there.

    Raises:
        ConfigError: They do not.
    """
    if train.graphs is True and not has_gpu:
        raise ConfigError(
            "train.graphs: true records operations of a GPU, and clients run on the CPU here, where only "
            "false is allowed; leave it out, or let clients use a GPU (cluster.gpus_per_actor=1, in one "
            "process cluster.device=cuda)"
        )
    if train.base_bits is not None and not has_gpu:
        raise ConfigError(
            f"train.base_bits: {train.base_bits} needs a GPU of NVIDIA, and clients run on the CPU here; "
            f"leave it out, or let clients use a GPU (cluster.gpus_per_actor=1, in one process "
            f"cluster.device=cuda)"
        )


def too_small(setup: Setup, cluster: ClusterConfig) -> str:
    """The reason why clients stay on the CPU and not on GPUs that the config does not ask for.

    Empty: they use the GPUs.

    Args:
        cluster: The section `cluster` of the config; `num_gpus` asks for GPUs, and `device` for one in a
            run in one process.
    """
    kind = setup.design.executor
    if kind.asks_for_gpu(cluster):
        return ""
    work = work_of_example(setup)
    if work is None or work >= WORTH:
        return ""
    return (
        f"clients run on the CPU, which is faster than a GPU with so little work for each example: "
        f"{work / 1e9:.2g} GFLOP (under {WORTH / 1e9:g}); "
        f"{kind.key_for_gpu} uses a GPU all the same"
    )


def work_of_example(setup: Setup) -> float | None:
    """Operations of training on one example, with all blocks; None: a part of the model cannot be counted."""
    context = setup.context
    whole = replace(context, train=replace(context.train, cache_features=False))  # they are computed once
    cost = count_cost(context.skeleton(), whole, None, 0)
    if cost is None:
        return None
    load = cost.load(None)
    return load.row + load.step / context.train.batch_size


def inline_device(setup: Setup, cluster: ClusterConfig) -> tuple[torch.device, str]:
    """Device of a run in one process, and why a GPU is not used although there is one; empty: no reason.

    Args:
        cluster: The section `cluster` of the config.

    Raises:
        ConfigError: There is no such device, which gives torch's reason, or `train` needs a GPU.
    """
    device = chosen_device(cluster.device)
    small = "" if device == HOST else too_small(setup, cluster)
    check_gpu(setup.context.train, device.type == "cuda" and not small)
    return (HOST, small) if small else (device, "")


def is_measured(cluster: ClusterConfig, nodes: Sequence[Mapping[str, float]]) -> bool:
    """Whether shares of GPUs follow from a measurement: they are not given, and there are GPUs."""
    return cluster.gpus_per_actor == "auto" and any(node.get("GPU", 0) >= 1 for node in nodes)


def on_gpu(measured: Measurement, mps: bool, per_gpu: int) -> str:
    """A sentence about a measurement on a GPU.

    Args:
        measured: The measurement.
        mps: NVIDIA's multi-process service serves the GPU.
        per_gpu: Number of actors that the GPU holds.
    """
    from rayfed.executors.cluster import TOGETHER

    shared = "; the actors of a GPU share it through MPS, where a fatal fault of one ends all" if mps else ""
    if not mps and per_gpu > TOGETHER:
        shared = f"; {TOGETHER} are started, because without MPS they take turns"
    took, total = size(measured.device_bytes), size(measured.device_total)
    return (
        f"client {measured.client} took {took} of a GPU of {total} and {measured.visit_s:.2f} s a visit: "
        f"a GPU holds at most {per_gpu} such actors{shared}"
    )
