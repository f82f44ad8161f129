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
from rayfed.report.folder import RunFolder
from rayfed.setup import Setup
from rayfed.types import Params
from rayfed.worker import World

Row = dict[str, Any]
GB = 1e9


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
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from rayfed.executors.cluster import Wish, connection, node_resources, plan
    from rayfed.executors.wire import pack

    experiment = setup.experiment
    with connection(
        cluster.address, cluster.num_cpus, cluster.num_gpus, cluster.dashboard, cluster.connect_timeout
    ) as url:
        wish = Wish(
            actors=cluster.actors,
            cpus=cluster.cpus_per_actor,
            gpus=cluster.gpus_per_actor,
            memory=cluster.memory_per_actor * GB,
        )
        found = plan(wish, len(experiment.clients), experiment.clients_per_round, node_resources())
        share = f" and {found.gpus:.3g} GPU" if found.gpus else ""
        notify(f"{found.actors} client actors with {found.cpus:.3g} CPU{share} each")
        if url:
            notify(f"Ray dashboard: http://{url}")
        # The driver writes the run folder, so it lives on the node of whoever started it.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        names = list(experiment.clients) if cluster.actors == "per_client" else None
        driver = (
            ray.remote(DriverActor)
            .options(num_cpus=0, max_restarts=0, scheduling_strategy=here)
            .remote(path.name, setup.experiment, setup.world, [ray.put(dict(setup.weights))], found, names)
        )
        try:
            seconds = ray.get(driver.start.remote(cluster.connect_timeout, cluster.retries))
            notify(f"actors ready after {seconds:.1f} s")
            domains = {c.id: c.domain for c in setup.partition.clients}
            rows = driver.rounds.options(num_returns="streaming").remote(pack(setup.start), path, domains)
            for row in rows:
                yield ray.get(row)
            ray.get(driver.close.remote())
        except ray.exceptions.RayTaskError as err:
            cause = err.cause if isinstance(err.cause, Exception) else err
            raise cause from err
        finally:
            ray.kill(driver)


@dataclass(eq=False)
class DriverActor:
    """The server of the federation as a Ray actor; it owns the client actors, which end when it ends."""

    name: str
    experiment: Experiment
    world: World
    weights: list[Any]
    plan: Any
    names: list[str] | None

    def __repr__(self) -> str:
        return f"rayfed:driver:{self.name}"

    def start(self, timeout: float, retries: int) -> float:
        """Reserve resources and start the client actors; returns the seconds it took."""
        import torch

        from rayfed.executors.actors import RayExecutor
        from rayfed.executors.cluster import reserve

        torch.set_num_threads(self.world.threads)
        began = time.perf_counter()
        self._group, options = reserve(self.plan, timeout)
        short = self.names or [f"{i:02d}" for i in range(self.plan.actors)]
        names = [f"rayfed:clients:{self.name}:{part}" for part in short]
        self._executor = RayExecutor(self.world, self.weights[0], names, options, retries)
        self._executor.where()  # returns when every actor has its model
        return time.perf_counter() - began

    def rounds(self, start: Any, path: Path, domains: dict[str, str]) -> Iterator[Row]:
        from rayfed.executors.wire import unpack

        params = {name: value.clone() for name, value in unpack(start).items()}
        yield from conduct(self.experiment, self._executor, params, RunFolder(path, domains))

    def where(self) -> list[dict[str, Any]]:
        return self._executor.where()

    def close(self) -> None:
        self._executor.close()
