"""Starts a prepared experiment in this process, or in a driver actor with a pool of client actors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfed.config.schema import Config
from rayfed.engine.loop import Experiment
from rayfed.engine.preflight import plan_actors
from rayfed.engine.recorded import Keeping, Watch, record_rounds
from rayfed.engine.setup import Setup
from rayfed.errors import ClusterError, RayFedError, StoppedError, one_line
from rayfed.executors.failures import Policy
from rayfed.executors.inline import InlineExecutor
from rayfed.executors.lane import namespace
from rayfed.executors.worker import World
from rayfed.terminal.stages import counted, stage
from rayfed.types import Row

if TYPE_CHECKING:
    from rayfed.executors.local_ray import Health

STOP_PATIENCE = 15.0  # seconds in which the driver must end the running exchange and save a checkpoint


def launch(
    setup: Setup,
    config: Config,
    path: Path,
    notify: Callable[[str], None] = lambda _: None,
    resume: bool = False,
    claim: str = "",
) -> Iterator[Row]:
    """Run and record an experiment in this process or on Ray, as the config says.

    Args:
        setup: The experiment, prepared from `config`.
        config: The config of the run.
        path: Folder of the run.
        notify: Called with a sentence about each thing that is started.
        resume: Continue after the last checkpoint in the folder, if there is one.
        claim: Token of the command that owns the folder, as it is in the folder's marker.

    Yields:
        One row per round, then a row with the digest of the final tensors.

    Raises:
        ConfigError: The cluster does not answer or cannot hold the actors.
        ClientError: A client failed.
        ClusterError: The driver or all client actors were lost.
    """
    keeping = Keeping.of(setup, config, path, resume, claim)
    if config.cluster.executor == "inline":
        executor = InlineExecutor(setup.world, setup.weights, config.failures)
        yield from record_rounds(setup.experiment, executor, setup.start, keeping)
    else:
        yield from _launch_on_ray(setup, config, keeping, notify)


def _launch_on_ray(
    setup: Setup, config: Config, keeping: Keeping, notify: Callable[[str], None]
) -> Iterator[Row]:
    from rayfed.executors.cluster import node_resources, reserved
    from rayfed.executors.connection import connection
    from rayfed.executors.metrics import labels_of
    from rayfed.executors.wire import pack

    cluster = config.cluster
    with connection(
        cluster.address, cluster.num_cpus, cluster.num_gpus, cluster.dashboard, cluster.connect_timeout
    ) as link:
        plan = plan_actors(cluster, setup.experiment, node_resources())
        share = f" and {plan.gpus:.3g} GPU" if plan.gpus else ""
        who = "1 client actor" if plan.actors == 1 else f"{plan.actors} client actors"
        notify(f"{who} with {plan.cpus:.3g} CPU{share}{'' if plan.actors == 1 else ' each'}")
        if link.url:
            notify(f"Ray dashboard: http://{link.url}")
        name = keeping.path.name
        space = namespace()
        metrics = labels_of(name, config.algorithm) if cluster.metrics else None
        with (
            reserved(plan, cluster.connect_timeout, link.health) as options,
            _driver(setup, name, space, link.health) as driver,
        ):
            actors = _named_actors(config, setup, f"rayfed:clients:{name}", space, options)
            began = time.perf_counter()
            stage(f"starting {'1 actor' if plan.actors == 1 else f'{plan.actors} actors'}", passing=True)
            with counted("actors started", plan.actors) as advance:
                started = driver.start.options(num_returns="streaming")
                for _ in _streamed(started.remote(actors, config.failures, metrics), link.health):
                    advance()
            notify(f"actors ready after {time.perf_counter() - began:.1f} s")
            rows = driver.rounds.options(num_returns="streaming")
            yield from _streamed(rows.remote(pack(setup.start), keeping), link.health)


def _streamed(results: Any, health: Health) -> Iterator[Any]:
    """The values of a streaming call, as they arrive."""
    import ray

    while True:
        health.wait(results)
        reference = next(results, None)
        if reference is None:
            return
        yield ray.get(reference)


def _named_actors(
    config: Config, setup: Setup, prefix: str, space: str, options: list[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Ray options of every client actor, by its name in the Ray namespace `space`."""
    per_client = config.cluster.actors == "per_client"
    lanes = list(setup.experiment.clients) if per_client else [f"{i:02d}" for i in range(len(options))]
    return {f"{prefix}:{lane}": {**own, "namespace": space} for lane, own in zip(lanes, options, strict=True)}


@contextmanager
def _driver(setup: Setup, name: str, space: str, health: Health) -> Iterator[Any]:
    """A driver actor, which is ended after the block; errors of Ray in the block become errors of RayFed.

    Raises:
        RayFedError: What the driver raised.
        ClusterError: The driver was lost, or Ray failed in it.
    """
    import ray

    driver = _start_driver(setup, name, space)
    try:
        yield driver
    except ray.exceptions.RayTaskError as err:
        if isinstance(err.cause, RayFedError):
            raise err.cause from err
        cause = err.cause if isinstance(err.cause, Exception) else err
        if isinstance(cause, ray.exceptions.RayError):
            raise ClusterError(health.reason(f"{type(cause).__name__}: {one_line(cause)}")) from err
        raise cause from err
    except ray.exceptions.RayActorError as err:
        lost = f"the driver actor was lost: {err}".splitlines()[0]
        raise ClusterError(health.reason(lost)) from err
    except (KeyboardInterrupt, GeneratorExit):
        # The driver ends the running exchange and saves the last finished round.
        with suppress(ray.exceptions.RayError, ClusterError):
            health.wait(driver.stop.remote(STOP_PATIENCE), timeout=2 * STOP_PATIENCE)
        raise
    finally:
        if not health.lost:
            # The driver owns the client actors, so they end with it.
            ray.kill(driver)


def _start_driver(setup: Setup, name: str, space: str) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # The driver writes the run folder, so it runs on the node on which the command was started.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    weights = [ray.put(dict(setup.weights))]
    return (
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


class DriverActor:
    """The driver as a Ray actor: it runs the round loop and owns the client actors, which end with it."""

    def __init__(self, name: str, experiment: Experiment, world: World, weights: list[Any]) -> None:
        self._name = name
        self._experiment = experiment
        self._world = world
        self._weights = weights
        self._ended = threading.Event()
        self._watch: Watch | None = None

    def __repr__(self) -> str:
        return f"rayfed:driver:{self._name}"

    def start(
        self,
        actors: Mapping[str, dict[str, Any]],
        policy: Policy,
        labels: Mapping[str, str] | None,
    ) -> Iterator[int]:
        """Start the client actors, and wait until every one has its model.

        Args:
            actors: Ray options of each client actor, by its name.
            policy: What is done when a client or an actor fails.
            labels: Labels of the metrics for Prometheus; None: no metrics.

        Yields:
            The number of actors that have started, once for each of them.
        """
        import torch

        from rayfed.executors.actors import RayExecutor
        from rayfed.executors.metrics import Metrics

        torch.set_num_threads(self._world.threads)
        self._executor = RayExecutor(
            self._world, self._weights[0], list(actors), list(actors.values()), policy, labels
        )
        self._watch = Metrics(labels) if labels else None
        try:
            yield from self._executor.starting()
        except StoppedError:
            self._ended.set()
            raise

    def rounds(self, start: Any, keeping: Keeping) -> Iterator[Row]:
        """Run and record all rounds; yields a row per round, then the digest of the final tensors."""
        from rayfed.executors.wire import unpack

        params = {name: value.clone() for name, value in unpack(start).items()}
        try:
            yield from record_rounds(self._experiment, self._executor, params, keeping, self._watch)
        except StoppedError:
            return
        finally:
            self._ended.set()

    def stop(self, patience: float) -> bool:
        """End the rounds early; returns whether they ended within `patience` seconds."""
        self._executor.stop()
        return self._ended.wait(patience)
