"""Conducts a prepared experiment: in this process, or in a driver actor with a pool of client actors."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rayfed.checkpoint import Checkpoints, Saved
from rayfed.cohort import Executor, Kept, Ledger, Visit
from rayfed.config import Config
from rayfed.driver import Experiment, Round, is_due, run
from rayfed.errors import ClusterError, LostStoreError, StoppedError, StorageError
from rayfed.evaluation.metrics import Evaluation
from rayfed.executors.inline import InlineExecutor
from rayfed.failures import Event, Policy
from rayfed.preflight import fit
from rayfed.report.console import SLOWEST, SLOWEST_SECONDS
from rayfed.report.folder import RunFolder
from rayfed.setup import Setup
from rayfed.types import Params
from rayfed.worker import World

log = logging.getLogger(__name__)

Row = dict[str, Any]
MOST_RESTARTS = 3  # of a round whose clients lost their stores
STOP_PATIENCE = 15.0  # seconds the driver has for ending the exchange under way and for saving


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """How a run is kept.

    Attributes:
        path: Folder of the run.
        domains: Domain of every client.
        every: A checkpoint after every such round, and after the last one (0: only then).
        keep: How many checkpoints stay.
        resume: Go on from the last checkpoint in the folder.
        tensorboard: Also write for TensorBoard.
    """

    path: Path
    domains: Mapping[str, str]
    every: int = 1
    keep: int = 2
    resume: bool = False
    tensorboard: bool = True


class Watch(Protocol):
    """Told what happens in a run, and never part of it."""

    def event(self, event: Event) -> None: ...
    def round(
        self,
        row: Row,
        ledger: Ledger,
        scores: Mapping[str, Evaluation],
        visits: Sequence[Visit],
        actors: int,
    ) -> None: ...


def conduct(
    experiment: Experiment,
    executor: Executor,
    start: Params,
    keeping: Keeping,
    watch: Watch | None = None,
) -> Iterator[Row]:
    """Run all rounds and write them down; yields each row, then one with the digest of the final tensors.

    A row also names the client that worked longest, which is not written down.

    However it ends, the rounds that were finished are on disk, with a checkpoint of the last one.

    Raises:
        ConfigError: Another process writes to the folder, or no checkpoint in it can be used.
        ClientError: A client failed, and the policy says to raise.
        StorageError: Something cannot be written.
        StoppedError: The run was asked to end.
    """
    folder = RunFolder(keeping.path, keeping.domains, keeping.tensorboard)
    checkpoints = Checkpoints(keeping.path, keeping.keep)

    def note(event: Event) -> None:
        folder.event(event)
        if watch is not None:
            watch.event(event)

    executor.on_event = note
    with folder.mine():
        resume = keeping.resume
        for _ in range(1 + MOST_RESTARTS):
            saved = checkpoints.load(start, folder.history.complete) if resume else None
            folder.begin(saved.state.round + 1 if saved else 0)
            executor.forget()
            if saved:
                saved.restore(executor)
            try:
                keeper = _Keeper(checkpoints, executor, keeping)
                yield from _rounds(experiment, executor, start, folder, keeper, saved, watch)
            except LostStoreError as err:
                log.warning("%s; going back to the last checkpoint", err)
                resume = True
            else:
                return
        raise ClusterError(f"the stores of clients were lost {1 + MOST_RESTARTS} times; giving up")


def _rounds(
    experiment: Experiment,
    executor: Executor,
    start: Params,
    folder: RunFolder,
    keeper: _Keeper,
    saved: Saved | None,
    watch: Watch | None,
) -> Iterator[Row]:
    params = saved.state.params if saved else start
    state = saved.state if saved else None
    personal = saved.personal if saved else {}
    visits: list[Visit] = []
    executor.on_visit = visits.append
    try:
        for done in run(experiment, executor, start, state, personal):
            params = done.state.params
            folder.add(done)
            seen = slowest(visits)
            if watch is not None:
                watch.round(done.row, done.ledger, done.scores, visits, len(getattr(executor, "lanes", ())))
            visits.clear()
            keeper.finished(
                done, is_due(keeper.keeping.every or experiment.rounds, done.state.round, experiment.rounds)
            )
            yield {**done.row, **seen}
        digest = folder.finish(params)
    except BaseException:
        with suppress(StorageError):  # what brought us here is what the user must hear of
            keeper.save_last()
            folder.write_tables()
        raise
    yield {"sha256": digest}


def slowest(visits: Sequence[Visit]) -> Row:
    """Who worked longest in a round, and how long: for the screen, because a clock is no result."""
    seconds: dict[str, float] = {}
    for visit in visits:
        seconds[visit.client] = seconds.get(visit.client, 0.0) + visit.seconds
    if not seconds:
        return {}
    name = max(seconds, key=lambda client: seconds[client])
    return {SLOWEST: name, SLOWEST_SECONDS: seconds[name]}


@dataclass
class _Keeper:
    """Saves rounds when they are due, and the last finished one when there may be no other."""

    checkpoints: Checkpoints
    executor: Executor
    keeping: Keeping
    unsaved: tuple[Round, dict[str, Kept]] | None = None

    def finished(self, done: Round, due: bool) -> None:
        # Stores move on in the next round; these are the ones that belong to this one.
        self.unsaved = done, self.executor.stores()
        if due:
            self.save_last()

    def save_last(self) -> None:
        if self.unsaved is not None:
            done, stores = self.unsaved
            self.checkpoints.save(done.state, done.scores.get("personal"), stores, self.executor)
            self.unsaved = None


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
    keeping = Keeping(
        path=path,
        domains={c.id: c.domain for c in setup.partition.clients},
        every=config.checkpoint.every,
        keep=config.checkpoint.keep,
        resume=resume,
        tensorboard=config.tensorboard,
    )
    if config.cluster.executor == "inline":
        executor = InlineExecutor(setup.world, setup.weights, policy(config))
        yield from conduct(setup.experiment, executor, setup.start, keeping)
        return
    yield from _launch_on_ray(setup, config, keeping, notify)


def policy(config: Config) -> Policy:
    """What the config says about failures."""
    return Policy(
        on_client_error=config.on_client_error,
        retries=config.cluster.retries,
        client_timeout=config.client_timeout,
        watchdog=config.watchdog,
        patience=max(config.cluster.connect_timeout, Policy.patience),
    )


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
        labels = {"run": name, "algorithm": config.algorithm, "trial": "none"}
        metrics = labels if config.cluster.metrics else None
        by_client = config.cluster.task_names == "client"
        seconds = ray.get(driver.start.remote(names, options, policy(config), metrics, by_client))
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
        names_clients: bool,
    ) -> float:
        """Start the client actors; returns the seconds until every one has its model."""
        import torch

        from rayfed.executors.actors import RayExecutor
        from rayfed.executors.metrics import Metrics

        torch.set_num_threads(self._world.threads)
        began = time.perf_counter()
        self._executor = RayExecutor(self._world, self._weights[0], names, options, policy, labels)
        self._executor.names_clients = names_clients
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
