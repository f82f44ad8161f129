"""Measures the largest client on a GPU of the cluster, and says how many client actors a GPU holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rayfed.config.sections import ClusterConfig
from rayfed.devices import HOST, USABLE, chosen_device
from rayfed.engine.costs import count_cost
from rayfed.engine.loop import Experiment
from rayfed.engine.measurement import Measurement, largest_client
from rayfed.engine.preflight import plan_actors
from rayfed.engine.setup import Setup
from rayfed.errors import BusyError, RayFedError, ResourceError, one_line
from rayfed.executors.mps import CLIENTS, mps_runs
from rayfed.executors.worker import Weights, World
from rayfed.terminal.console import size
from rayfed.terminal.stages import stage

if TYPE_CHECKING:
    from rayfed.executors.cluster import Plan
    from rayfed.executors.local_ray import Health

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

    def plan(self, setup: Setup, cluster: ClusterConfig, weights: Callable[[], Any], health: Health) -> Plan:
        """Number and resources of the client actors of an experiment on the nodes of Ray.

        Args:
            setup: The checked experiment.
            cluster: The section `cluster` of the config.
            weights: Gives the object reference of the initial tensors.
            health: Watch on the processes of Ray.

        Raises:
            ResourceError: The actors do not fit; the message says what would.
            RayFedError: The measured client failed.
        """
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


def too_small(setup: Setup, cluster: ClusterConfig) -> str:
    """Why clients stay on the CPU beside GPUs that the config does not ask for; empty: they use the GPUs.

    Args:
        setup: The checked experiment.
        cluster: The section `cluster` of the config; `num_gpus` asks for GPUs, and `device` for one in a
            run in one process.
    """
    inline = cluster.executor == "inline"
    asked = cluster.device != "auto" if inline else cluster.num_gpus is not None
    if asked:
        return ""
    world = setup.world
    whole = replace(world, train=replace(world.train, cache_features=False))  # they are computed once
    cost = count_cost(world.skeleton(), whole, None, 0)
    if cost is None:
        return ""
    load = cost.load(None)
    work = load.row + load.step / world.train.batch_size
    if work >= WORTH:
        return ""
    return (
        f"clients run on the CPU, which is faster than a GPU with so little work for each example: "
        f"{work / 1e9:.2g} GFLOP (under {WORTH / 1e9:g}); "
        f"cluster.{'device=cuda' if inline else 'gpus_per_actor=1'} uses a GPU all the same"
    )


def inline_device(setup: Setup, cluster: ClusterConfig) -> tuple[torch.device, str]:
    """Device of a run in one process, and why a GPU is not used although there is one; empty: no reason.

    Args:
        setup: The checked experiment.
        cluster: The section `cluster` of the config.

    Raises:
        ConfigError: There is no such device; gives torch's reason.
    """
    device = chosen_device(cluster.device)
    small = "" if device == HOST else too_small(setup, cluster)
    return (HOST, small) if small else (device, "")


def is_measured(cluster: ClusterConfig, nodes: Sequence[Mapping[str, float]]) -> bool:
    """Whether shares of GPUs follow from a measurement: they are not given, and there are GPUs."""
    return cluster.gpus_per_actor == "auto" and any(node.get("GPU", 0) >= 1 for node in nodes)


def measured_on_gpu(
    setup: Setup, weights: Any, cluster: ClusterConfig, health: Health
) -> tuple[Measurement, bool] | None:
    """Run the largest client on a GPU of the cluster, which is reserved meanwhile.

    Args:
        setup: The checked experiment.
        weights: Object reference of the initial tensors.
        cluster: The section `cluster` of the config.
        health: Watch on the processes of Ray.

    Returns:
        The measurement, and whether MPS serves that GPU; None: torch sees no GPU there, although Ray was told
        that there is one.

    Raises:
        BusyError: No GPU became free in time.
        ResourceError: It has too little memory; says what would fit.
        RayFedError: The client failed.
    """
    import ray

    from rayfed.executors.cluster import FINEST, Plan, reserved

    with reserved(Plan(actors=1, cpus=1 / FINEST, gpus=1.0), cluster.connect_timeout, health) as (options,):
        task = ray.remote(max_calls=1)(_visit).options(**options, max_retries=0)
        reference = task.remote(setup.experiment, setup.world, weights)
        health.wait(reference)
        try:
            found: tuple[Measurement, bool] | None = ray.get(reference)
        except ray.exceptions.RayTaskError as err:
            raise (err.cause if isinstance(err.cause, RayFedError) else err) from err
        except ray.exceptions.RayError as err:
            died = f"{type(err).__name__}: {one_line(err)}"
            raise ResourceError(
                f"model.name: the process of the measured client died ({died[:200]}); try a smaller model or "
                f"train.batch_size"
            ) from err
        return found


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


def _visit(experiment: Experiment, world: World, weights: Weights) -> tuple[Measurement, bool] | None:
    if not torch.cuda.is_available():
        return None
    return largest_client(experiment, world, torch.device("cuda:0"), weights), mps_runs()
