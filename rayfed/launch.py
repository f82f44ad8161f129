"""Conducts a prepared experiment: in this process, or in a driver actor with a pool of client actors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayfed.cohort import Executor
from rayfed.config import ClusterConfig
from rayfed.driver import Experiment, run
from rayfed.executors.inline import InlineExecutor
from rayfed.preflight import fit
from rayfed.report.folder import RunFolder
from rayfed.setup import Setup
from rayfed.types import Params
from rayfed.worker import World

Row = dict[str, Any]


def conduct(experiment: Experiment, executor: Executor, start: Params, folder: RunFolder) -> Iterator[Row]:
    """Run all rounds and write them down; yields each row, then one with the digest of the final tensors."""
    params = start
    try:
        for done in run(experiment, executor, start):
            params = done.state.params
            folder.add(done)
            yield done.row
    except BaseException:
        folder.write_tables()
        raise
    yield {"sha256": folder.finish(params)}


def run_folder(setup: Setup, path: Path) -> RunFolder:
    domains = {c.id: c.domain for c in setup.partition.clients}
    return RunFolder(path, domains)


def launch(
    setup: Setup, cluster: ClusterConfig, path: Path, notify: Callable[[str], None] = lambda _: None
) -> Iterator[Row]:
    """Conduct an experiment where the config says; yields a row per round, then the digest.

    Raises:
        ConfigError: The cluster does not answer or cannot hold the actors.
        ClientError: A client failed.
    """
    if cluster.executor == "inline":
        executor = InlineExecutor(setup.world, setup.weights)
        yield from conduct(setup.experiment, executor, setup.start, run_folder(setup, path))
        return
    yield from _launch_on_ray(setup, cluster, path, notify)


def _launch_on_ray(
    setup: Setup, cluster: ClusterConfig, path: Path, notify: Callable[[str], None]
) -> Iterator[Row]:
    from rayfed.executors.cluster import connection, node_resources, reserved

    with connection(
        cluster.address, cluster.num_cpus, cluster.num_gpus, cluster.dashboard, cluster.connect_timeout
    ) as url:
        found = fit(cluster, setup.experiment, node_resources())
        share = f" and {found.gpus:.3g} GPU" if found.gpus else ""
        notify(f"{found.actors} client actors with {found.cpus:.3g} CPU{share} each")
        if url:
            notify(f"Ray dashboard: http://{url}")
        with reserved(found, cluster.connect_timeout) as options:
            yield from _drive(setup, cluster, path, options, notify)


def _drive(
    setup: Setup,
    cluster: ClusterConfig,
    path: Path,
    options: list[dict[str, Any]],
    notify: Callable[[str], None],
) -> Iterator[Row]:
    """Start the driver actor on reserved resources and pass on what it reports."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from rayfed.executors.wire import pack

    # The driver writes the run folder, so it lives on the node of whoever started it.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    weights = [ray.put(dict(setup.weights))]
    driver: Any = (
        ray.remote(DriverActor)
        .options(num_cpus=0, max_restarts=0, scheduling_strategy=here)
        .remote(path.name, setup.experiment, setup.world, weights)
    )
    per_client = cluster.actors == "per_client"
    lanes = list(setup.experiment.clients) if per_client else [f"{i:02d}" for i in range(len(options))]
    names = [f"rayfed:clients:{path.name}:{lane}" for lane in lanes]
    domains = {c.id: c.domain for c in setup.partition.clients}
    try:
        seconds = ray.get(driver.start.remote(names, options, cluster.retries))
        notify(f"actors ready after {seconds:.1f} s")
        rows = driver.rounds.options(num_returns="streaming").remote(pack(setup.start), path, domains)
        for row in rows:
            yield ray.get(row)
    except ray.exceptions.RayTaskError as err:
        cause = err.cause if isinstance(err.cause, Exception) else err
        raise cause from err
    finally:
        # Client actors belong to the driver and end with it.
        ray.kill(driver)


@dataclass(eq=False)
class DriverActor:
    """The server of the federation as a Ray actor; it owns the client actors, which end when it ends."""

    name: str
    experiment: Experiment
    world: World
    weights: list[Any]

    def __repr__(self) -> str:
        return f"rayfed:driver:{self.name}"

    def start(self, names: list[str], options: list[dict[str, Any]], retries: int) -> float:
        """Start the client actors; returns the seconds until every one has its model."""
        import torch

        from rayfed.executors.actors import RayExecutor

        torch.set_num_threads(self.world.threads)
        began = time.perf_counter()
        self._executor = RayExecutor(self.world, self.weights[0], names, options, retries)
        self._executor.where()
        return time.perf_counter() - began

    def rounds(self, start: Any, path: Path, domains: dict[str, str]) -> Iterator[Row]:
        from rayfed.executors.wire import unpack

        params = {name: value.clone() for name, value in unpack(start).items()}
        yield from conduct(self.experiment, self._executor, params, RunFolder(path, domains))

    def where(self) -> list[dict[str, Any]]:
        return self._executor.where()
