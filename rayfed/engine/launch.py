"""Starts a prepared experiment: in this process, or in a driver actor with a pool of client actors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rayfed.config.schema import Config
from rayfed.engine.loop import Experiment
from rayfed.engine.preflight import fit
from rayfed.engine.recorded import Keeping, Watch, conduct
from rayfed.engine.setup import Setup
from rayfed.errors import ClusterError, StoppedError
from rayfed.executors.failures import Policy
from rayfed.executors.inline import InlineExecutor
from rayfed.executors.worker import World

Row = dict[str, Any]
STOP_PATIENCE = 15.0  # seconds the driver has for ending the exchange under way and for saving


def launch(
    setup: Setup,
    config: Config,
    path: Path,
    notify: Callable[[str], None] = lambda _: None,
    resume: bool = False,
) -> Iterator[Row]:
    """Conduct an experiment where the config says; yields a row per round, then the digest.

    Args:
        setup: The experiment, prepared from `config`.
        config: What to run where.
        path: Folder of the run.
        notify: Told what is being started.
        resume: Go on after the last checkpoint in the folder, if there is one.

    Raises:
        ConfigError: The cluster does not answer or cannot hold the actors.
        ClientError: A client failed.
        ClusterError: The driver or all client actors were lost.
    """
    keeping = Keeping.of(setup, config, path, resume)
    if config.cluster.executor == "inline":
        executor = InlineExecutor(setup.world, setup.weights, config.failures)
        yield from conduct(setup.experiment, executor, setup.start, keeping)
        return
    yield from _launch_on_ray(setup, config, keeping, notify)


def _launch_on_ray(
    setup: Setup, config: Config, keeping: Keeping, notify: Callable[[str], None]
) -> Iterator[Row]:
    from rayfed.executors.cluster import connection, node_resources, reserved

    cluster = config.cluster
    with connection(
        cluster.address, cluster.num_cpus, cluster.num_gpus, cluster.dashboard, cluster.connect_timeout
    ) as url:
        found = fit(cluster, setup.experiment, node_resources())
        share = f" and {found.gpus:.3g} GPU" if found.gpus else ""
        notify(f"{found.actors} client actors with {found.cpus:.3g} CPU{share} each")
        if url:
            notify(f"Ray dashboard: http://{url}")
        with reserved(found, cluster.connect_timeout) as options:
            yield from _drive(setup, config, keeping, options, notify)


def _drive(
    setup: Setup,
    config: Config,
    keeping: Keeping,
    options: list[dict[str, Any]],
    notify: Callable[[str], None],
) -> Iterator[Row]:
    """Start the driver actor on reserved resources and pass on what it reports."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from rayfed.executors.lane import namespace
    from rayfed.executors.metrics import labels_of
    from rayfed.executors.wire import pack

    # The driver writes the run folder, so it lives on the node of whoever started it.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    weights, name, space = [ray.put(dict(setup.weights))], keeping.path.name, namespace()
    driver: Any = (
        ray.remote(DriverActor)
        .options(
            name=f"rayfed:driver:{name}",
            namespace=space,
            num_cpus=0,
            max_restarts=0,
            max_concurrency=2,
            scheduling_strategy=here,
        )
        .remote(name, setup.experiment, setup.world, weights)
    )
    per_client = config.cluster.actors == "per_client"
    lanes = list(setup.experiment.clients) if per_client else [f"{i:02d}" for i in range(len(options))]
    names = [f"rayfed:clients:{name}:{lane}" for lane in lanes]
    options = [{**own, "namespace": space} for own in options]
    try:
        metrics = labels_of(name, config.algorithm) if config.cluster.metrics else None
        seconds = ray.get(driver.start.remote(names, options, config.failures, metrics))
        notify(f"actors ready after {seconds:.1f} s")
        rows = driver.rounds.options(num_returns="streaming").remote(pack(setup.start), keeping)
        for row in rows:
            yield ray.get(row)
    except ray.exceptions.RayTaskError as err:
        cause = err.cause if isinstance(err.cause, Exception) else err
        raise cause from err
    except ray.exceptions.RayActorError as err:
        raise ClusterError(f"the driver actor was lost: {err}".splitlines()[0]) from err
    except (KeyboardInterrupt, GeneratorExit):
        # It ends the exchange under way and saves the last finished round.
        with suppress(ray.exceptions.RayError):
            ray.get(driver.stop.remote(STOP_PATIENCE), timeout=2 * STOP_PATIENCE)
        raise
    finally:
        # Client actors belong to the driver and end with it.
        ray.kill(driver)


class DriverActor:
    """The server of the federation as a Ray actor; it owns the client actors, which end when it ends."""

    def __init__(self, name: str, experiment: Experiment, world: World, weights: list[Any]) -> None:
        self._name, self._experiment, self._world, self._weights = name, experiment, world, weights
        self._ended = threading.Event()
        self._watch: Watch | None = None

    def __repr__(self) -> str:
        return f"rayfed:driver:{self._name}"

    def start(
        self,
        names: list[str],
        options: list[dict[str, Any]],
        policy: Policy,
        labels: Mapping[str, str] | None,
    ) -> float:
        """Start the client actors; returns the seconds until every one has its model."""
        import torch

        from rayfed.executors.actors import RayExecutor
        from rayfed.executors.metrics import Metrics

        torch.set_num_threads(self._world.threads)
        began = time.perf_counter()
        self._executor = RayExecutor(self._world, self._weights[0], names, options, policy, labels)
        self._watch = Metrics(labels) if labels else None
        self._executor.where()
        return time.perf_counter() - began

    def rounds(self, start: Any, keeping: Keeping) -> Iterator[Row]:
        from rayfed.executors.wire import unpack

        params = {name: value.clone() for name, value in unpack(start).items()}
        try:
            yield from conduct(self._experiment, self._executor, params, keeping, self._watch)
        except StoppedError:
            return
        finally:
            self._ended.set()

    def stop(self, patience: float) -> bool:
        """Ask the rounds to end; whether they did within so many seconds."""
        self._executor.stop()
        return self._ended.wait(patience)

    def where(self) -> list[dict[str, Any]]:
        return self._executor.where()
