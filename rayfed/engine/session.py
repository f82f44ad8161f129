"""Ray and the actors of one command, which its runs use one after the other.

An experiment runs in this process, or on a driver actor, which runs the round loop on its node and owns the
client actors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rayfed.config.design import Design
from rayfed.devices import HOST, settings_restored, use_threads
from rayfed.engine.client_places import GpuPlans, inline_device
from rayfed.engine.loop import RoundPlan
from rayfed.engine.record_rounds import RecordSettings, Watch, record_rounds
from rayfed.engine.setup import Setup
from rayfed.errors import ClusterError, RayFedError, StoppedError, one_line
from rayfed.executors.actor_state import namespace
from rayfed.executors.cluster_config import ClusterConfig
from rayfed.executors.worker import choose_settings
from rayfed.federation.executor import Policy
from rayfed.federation.train_config import TrainConfig
from rayfed.record.folder import add_nodes
from rayfed.terminal.console import count_up, stage
from rayfed.terminal.exit_code import STOP
from rayfed.types import Row

if TYPE_CHECKING:
    import torch

    from rayfed.engine.weight_store import WeightStore
    from rayfed.executors.actor_pool import RayExecutor
    from rayfed.executors.cluster import ActorPlan
    from rayfed.executors.connection import Connection, Health
    from rayfed.executors.node_check import NodeFacts
    from rayfed.executors.worker import ClientContext, Weights


LESS_THAN_CLIENTS = 500
"""Score by which the kernel chooses a process to kill where memory is short; Ray gives its workers 1000."""


def spare_from_memory_kills() -> None:
    """Let the kernel kill a client actor, which is replaced, before this process, which is not."""
    with suppress(OSError):  # another system than Linux, or not allowed
        Path("/proc/self/oom_score_adj").write_text(str(LESS_THAN_CLIENTS))


class DriverActor:
    """The driver as a Ray actor: it runs one experiment after the other on its client actors.

    The session starts these next to it, so that all import torch at the same time, and ends them with it.
    """

    def __init__(self, name: str) -> None:
        spare_from_memory_kills()
        self._name = name
        self._executor: RayExecutor | None = None
        self._may_go_on = threading.Event()

    def __repr__(self) -> str:
        return f"rayfed:driver:{self._name}"

    def start(
        self,
        experiment: RoundPlan,
        shared: Sequence[Any],
        actors: Mapping[str, dict[str, Any]],
        started: Sequence[Any],
        policy: Policy,
        labels: Mapping[str, str] | None,
    ) -> Iterator[int]:
        """Wait for the models of the client actors; those that run already change to this experiment.

        Args:
            experiment: The experiment whose rounds are run next.
            shared: Object references of what its client actors need (`ClientContext`) and of the initial
                tensors, in a list so that Ray does not read them.
            actors: Ray options of each client actor, by its name.
            started: The actors themselves; empty: those of the experiment before.
            policy: What is done when a client or an actor fails.
            labels: Labels of the metrics for Prometheus; None: no metrics.

        Yields:
            The number of actors that are ready, once for each of them.
        """
        import ray

        from rayfed.executors.actor_pool import RayExecutor
        from rayfed.executors.prometheus import Metrics

        context, weights = shared
        use_threads(ray.get(context).threads)
        self._experiment = experiment
        self._ended = threading.Event()
        self._executor = RayExecutor(
            context, weights, list(actors), list(actors.values()), policy, labels, self._executor, started
        )
        self._watch: Watch | None = Metrics(labels) if labels else None
        try:
            yield from self._executor.starting()
        except BaseException:  # `stop` waits for this; GeneratorExit is raised where the command has ended
            self._ended.set()
            raise

    def rounds(self, start: Any, keeping: RecordSettings, waits: bool) -> Iterator[Row]:
        """Run and record all rounds; yields a row per round, then the digest of the final tensors.

        Args:
            start: Initial tensors, packed.
            keeping: Folder and settings for recording.
            waits: Wait for `go_on` after each row, as the next round may not be wanted.
        """
        from rayfed.executors.client_actor import Trim, leave_out_of_garbage_collection
        from rayfed.executors.wire import unpack

        assert self._executor is not None  # `start` was called
        params = {name: value.clone() for name, value in unpack(start).items()}
        leave_out_of_garbage_collection()
        trim = Trim()
        try:
            for row in record_rounds(self._experiment, self._executor, params, keeping, self._watch):
                trim.now_and_then()
                self._may_go_on.clear()
                yield row
                if waits:
                    self._may_go_on.wait()
        except StoppedError:
            return
        finally:
            self._ended.set()

    def go_on(self) -> None:
        """Begin the next round."""
        self._may_go_on.set()

    def stop(self, patience: float) -> bool:
        """End the rounds early; returns whether they ended within `patience` seconds."""
        if self._executor is None:
            return True
        self._executor.stop()
        self._may_go_on.set()
        return self._ended.wait(patience)


STOP_PATIENCE = 15.0  # seconds in which the driver must end the running exchange and save a checkpoint

Notify = Callable[[str], None]


class Session:
    """Ray, the resources reserved on it, and the driver and client actors on these.

    Ray is started or joined by the first run that needs it. A later run takes over the actors of the run
    before if it needs as many of the same size; otherwise, and after an error, it starts its own. The actors
    of a run that a rule ended between two rounds stay, too.

    Several sessions can share one Ray, each in its own thread; then their config says how many actors of
    which size each of them has.

    Attributes:
        waits: A round begins when the row of the one before was taken, as with `inline`, so that a rule ends
            the rounds always after the same one.
        trial: Name of the sweep and of its trial, for the labels of the metrics; None: the run is none.
    """

    def __init__(self, link: Connection | None = None, store: WeightStore | None = None) -> None:
        """Begin a session.

        Args:
            link: The Ray that it shares; None: it starts or joins one when the first run needs it.
            store: Initial tensors that sessions share; None: those of one run are kept until the next one.
        """
        self._ray = ExitStack()
        self._actors = ExitStack()
        self.waits = False
        self.trial: tuple[str, str] | None = None
        self._idle = False
        self._link = link
        self._store = store
        self._driver: Any = None
        self._named: dict[str, dict[str, Any]] = {}
        self._fits: tuple[object, ...] = ()
        self._put: tuple[Weights, Any] | None = None
        self._ray.callback(self._end_actors)
        self._gpus = GpuPlans()
        self._nodes: dict[tuple[object, ...], list[NodeFacts]] = {}

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ray.__exit__(kind, error, trace)

    @property
    def lost(self) -> str:
        """Message about a process of Ray that ended, after which no run can begin; empty: there is none."""
        return self._link.health.lost if self._link else ""

    def check(self, cluster: ClusterConfig, setup: Setup) -> None:
        """Start or join Ray, reserve the resources of the actors there, and release them.

        For a run that replaces another one, whose files are removed before the new run starts. Does nothing
        for an experiment that runs in this process.

        Args:
            cluster: The section `cluster` of the config.

        Raises:
            ConfigError: No cluster answers at the address.
            ResourceError: The cluster cannot hold the actors, or is busy.
            ClusterError: Ray could not be started on this machine.
        """
        if not setup.design.executor.needs_cluster:
            return
        from rayfed.executors.cluster import reserve

        link = self._connect(cluster)
        nodes = self._checked_nodes(setup, cluster)
        plan = self._gpus.plan(setup, cluster, lambda: self._reference(setup), link.health)
        check_kinds(nodes, plan, cluster)
        with reserve(plan, cluster.connect_timeout, link.health):
            pass

    def rows(self, setup: Setup, keeping: RecordSettings, notify: Notify) -> Generator[Row, None, None]:
        """Run and record an experiment on Ray.

        Args:
            keeping: Folder and settings for recording.
            notify: Called with a sentence about each thing that is started.

        Yields:
            One row per round, then a row with the digest of the final tensors.

        Raises:
            ConfigError: The cluster does not answer or cannot hold the actors.
            RayFedError: What the driver raised.
            ClusterError: The driver or all client actors were lost.
        """
        import ray

        from rayfed.executors.wire import pack

        design = setup.design
        link = self._connect(design.cluster)
        name = keeping.path.name
        labels = self.labels(design, name)
        with self._ended_by_errors(link.health):
            if nodes := self._checked_nodes(setup, design.cluster):
                add_nodes(keeping.path, [node.row for node in nodes])
            reused = self._place(setup, name, notify, link, nodes)
            with self._stopped_early(link.health):
                began = time.perf_counter()
                shared = [ray.put(setup.context), self._reference(setup)]
                clients = [] if reused else self._start_clients(shared, labels, link.health)
                start = self._driver.start.options(num_returns="streaming")
                given = (setup.experiment, shared, self._named, clients, design.failures, labels)
                _wait_for_actors(start.remote(*given), len(self._named), reused, link.health)
                if not reused:
                    notify(f"actors ready after {time.perf_counter() - began:.1f} s")
                rows = self._driver.rounds.options(num_returns="streaming")
                for row in _stream(rows.remote(pack(setup.start), keeping, self.waits), link.health):
                    yield row
                    if self.waits:
                        self._driver.go_on.remote()

    def labels(self, design: Design, run: str) -> dict[str, str] | None:
        """Labels of the metrics of a run; None: it has none. Args: run: name of its folder."""
        from rayfed.executors.prometheus import labels_of

        if not design.cluster.metrics:
            return None
        name, *trial = (run,) if self.trial is None else self.trial
        return labels_of(name, design.names.algorithm, *trial)

    @contextmanager
    def _ended_by_errors(self, health: Health) -> Iterator[None]:
        """Any error in the block ends the actors; those of Ray become errors of RayFed."""
        self._idle = False
        try:
            with _as_own_errors(health):
                yield
        except BaseException:
            if not self._idle:
                self._end_actors()
            raise

    @contextmanager
    def _stopped_early(self, health: Health) -> Iterator[None]:
        """Where the block is left early, the driver ends its exchange and saves the last finished round.

        Where it waited for its next round to be wanted, the actors do nothing then, and stay.
        """
        import ray

        try:
            yield
        except (KeyboardInterrupt, GeneratorExit) as err:
            with suppress(ray.exceptions.RayError, ClusterError):
                stopped = self._driver.stop.remote(STOP_PATIENCE)
                health.wait(stopped, timeout=2 * STOP_PATIENCE)
                waited = self.waits and isinstance(err, GeneratorExit)
                self._idle = waited and bool(ray.get(stopped, timeout=0))
            raise

    def _connect(self, cluster: ClusterConfig) -> Connection:
        """Start or join Ray, unless an earlier run did."""
        from rayfed.executors.connection import connection

        if self._link is None:
            numbers = (cluster.num_cpus, cluster.num_gpus, cluster.dashboard, cluster.connect_timeout)
            self._link = self._ray.enter_context(connection(cluster.address, *numbers))
            self._ray.callback(self._end_actors)  # before Ray ends
        return self._link

    def _checked_nodes(self, setup: Setup, cluster: ClusterConfig) -> list[NodeFacts]:
        """Facts of all nodes, which can run this experiment; empty where this machine is the only node.

        A node without the prepared data set gets a copy. Nodes are asked once for each data set and each set
        of modules, while no other node joins.

        Raises:
            ConfigError: A node cannot, and why.
        """
        import ray

        from rayfed.executors.copy_to_nodes import copy_to_nodes
        from rayfed.executors.node_check import check_nodes, facts_here, look_at_nodes, user_modules

        alive = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
        if len(alive) == 1:
            return []
        data, modules = setup.context.shard, user_modules(setup.context, setup.experiment)
        key = (data, *modules, *alive)
        if key not in self._nodes:
            stage(f"checking {len(alive)} nodes")
            own = facts_here(ray.get_runtime_context().get_node_id(), data, modules)
            nodes = look_at_nodes(data, modules, cluster.connect_timeout)
            check_nodes(nodes, own)
            if without := [node.host for node in nodes if node.data != data.stat().st_size]:
                stage(f"copying the data to {', '.join(without)}")
                copy_to_nodes(data, nodes)
            self._nodes[key] = nodes
        return self._nodes[key]

    def _place(
        self, setup: Setup, name: str, notify: Notify, link: Connection, nodes: Sequence[NodeFacts]
    ) -> bool:
        """Reserve resources and start a driver on them; returns whether those of an earlier run fit."""
        from rayfed.executors.cluster import reserve

        design = setup.design
        plan = self._gpus.plan(setup, design.cluster, lambda: self._reference(setup), link.health)
        check_kinds(nodes, plan, design.cluster)
        per_client = design.cluster.actors == "per_client"
        lanes = tuple(setup.experiment.clients) if per_client else tuple(_numbers(plan.actors))
        if self._driver is not None and self._fits == (plan, lanes):
            return True
        self._end_actors()
        if self._gpus.sentence:
            notify(self._gpus.sentence)
        _announce(plan, link, notify)
        if plan.gpus and (hint := cheaper_products(design.train)):
            notify(hint)
        if plan.gpus and setup.context.train.pack_texts:
            notify(PADDED)
        options = self._actors.enter_context(reserve(plan, design.cluster.connect_timeout, link.health))
        space = namespace()
        prefix = f"rayfed:clients:{name}"
        self._named = {
            f"{prefix}:{lane}": {**own, "namespace": space} for lane, own in zip(lanes, options, strict=True)
        }
        self._driver = _start_driver(name, space)
        self._actors.callback(_kill, self._driver, link.health)
        self._fits = (plan, lanes)
        return False

    def _start_clients(
        self, shared: Sequence[Any], labels: Mapping[str, str] | None, health: Health
    ) -> list[Any]:
        """Start the client actors while the driver imports what it needs; they end with it."""
        from rayfed.executors.actor_pool import start_client
        from rayfed.executors.actor_state import ActorHandle

        context, weights = shared
        clients = []
        for name, options in self._named.items():
            clients.append(start_client(ActorHandle(name, options), context, weights, labels))
            self._actors.callback(_kill, clients[-1], health)
        return clients

    def _reference(self, setup: Setup) -> Any:
        """Object reference of the initial tensors, which are put into the object store once."""
        import ray

        if self._store is not None:
            return self._store.put(setup.weights)
        if self._put is None or self._put[0] is not setup.weights:
            self._put = (setup.weights, ray.put(dict(setup.weights)))
        return self._put[1]

    def _end_actors(self) -> None:
        """End the driver and the client actors, and release their resources."""
        self._driver = None
        self._put = None
        self._actors.close()


def check_kinds(nodes: Sequence[NodeFacts], plan: ActorPlan, cluster: ClusterConfig) -> None:
    """Check that the nodes on which there is room for an actor are of one kind, unless others are allowed.

    Raises:
        ConfigError: They are not.
    """
    import ray

    from rayfed.executors.node_check import check_same_hardware

    room = {
        node["NodeID"]
        for node in ray.nodes()
        if all(node["Resources"].get(name, 0) >= amount for name, amount in plan.bundle.items())
    }
    if not cluster.mixed_hardware:
        check_same_hardware([node for node in nodes if node.node in room], plan.gpus > 0)


def _wait_for_actors(results: Any, total: int, reused: bool, health: Health) -> None:
    """Wait until all actors are ready, and count them; those that run already are ready at once."""
    if reused:
        stage("loading the model of this run into the actors", passing=True)
        for _ in _stream(results, health):
            pass
        return
    stage(f"starting {'1 actor' if total == 1 else f'{total} actors'}", passing=True)
    with count_up("actors started", total) as advance:
        for _ in _stream(results, health):
            advance()


def _stream(results: Any, health: Health) -> Iterator[Any]:
    """The values of a streaming call, as they arrive."""
    import ray

    while True:
        health.wait(results, ended=STOP.is_set)
        if STOP.is_set():  # a signal raises in the main thread only
            raise KeyboardInterrupt
        reference = next(results, None)
        if reference is None:
            return
        yield ray.get(reference)


def _watch_of(session: Session | None, design: Design, path: Path) -> Watch | None:
    """The metrics of a run in this process, which has some where it is the trial of a sweep, on Ray."""
    if session is None or session.trial is None or (labels := session.labels(design, path.name)) is None:
        return None
    from rayfed.executors.prometheus import Metrics

    return Metrics(labels)


def _one_at_a_time(rows: Iterator[Row], context: ClientContext, device: torch.device) -> Iterator[Row]:
    """The rows of a run in this process, whose rounds wait for those of runs in other threads."""
    while True:
        with settings_restored():
            choose_settings(context, device)
            row = next(rows, None)
        if row is None:
            return
        yield row


def _numbers(count: int) -> Iterator[str]:
    return (f"{i:02d}" for i in range(count))


PADDED = "batches of texts are padded (train.pack_texts), because clients run on a GPU"
"""Where clients run is known after the header that says for which other reasons texts are padded."""


def cheaper_products(train: TrainConfig) -> str:
    """A sentence: the time that a lower precision would save on a GPU; empty: it is set, or impossible.

    The shares are NVIDIA's peak rates of an H100 SXM without sparsity: 67 TFLOP/s in float32, 494 in
    TensorFloat-32 and 989 in bfloat16.
    """
    if train.precision != "fp32":
        return ""
    return (
        "train.precision=fp32 multiplies matrices without the tensor cores of a GPU; on an H100 that is "
        "up to 7 times as fast with train.precision=tf32, and 15 times with bf16, in less memory"
    )


def _announce(plan: ActorPlan, link: Connection, notify: Notify) -> None:
    share = f" and {plan.gpus:.3g} GPU" if plan.gpus else ""
    who = "1 client actor" if plan.actors == 1 else f"{plan.actors} client actors"
    notify(f"{who} with {plan.cpus:.3g} CPU{share}{'' if plan.actors == 1 else ' each'}")
    if link.url:
        notify(f"Ray dashboard: http://{link.url}")


@contextmanager
def _as_own_errors(health: Health) -> Iterator[None]:
    """Errors of Ray in the block become errors of RayFed.

    Raises:
        RayFedError: What the driver raised.
        ClusterError: The driver was lost, or Ray failed in it.
    """
    import ray

    try:
        yield
    except ray.exceptions.RayTaskError as err:
        if isinstance(err.cause, RayFedError):
            raise err.cause from err
        cause = err.cause if isinstance(err.cause, Exception) else err
        if isinstance(cause, ray.exceptions.RayError):
            raise ClusterError(health.reason(f"{type(cause).__name__}: {one_line(cause)}")) from err
        raise cause from err
    except ray.exceptions.RayActorError as err:
        lost = f"the driver actor was lost: {err}".splitlines()[0]
        if "SYSTEM_ERROR" in str(err):
            lost += " Its process was killed, perhaps because memory was short; `dmesg` says so"
        raise ClusterError(health.reason(lost)) from err


def _kill(actor: Any, health: Health) -> None:
    """End the driver, with it the client actors that it has started, or a client actor."""
    import ray

    if not health.lost:
        ray.kill(actor)


def _start_driver(name: str, space: str) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # The driver writes the run folder, so it runs on the node on which the command was started.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
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
        .remote(name)
    )


@contextmanager
def launch(
    setup: Setup,
    path: Path,
    notify: Callable[[str], None] = lambda _: None,
    resume: bool = False,
    claim: str = "",
    session: Session | None = None,
) -> Iterator[Iterator[Row]]:
    """While the block runs, run and record an experiment with its executor.

    Args:
        notify: Called with a sentence about each thing that is started.
        resume: Continue after the last checkpoint in the folder, if there is one.
        claim: Token of the command that owns the folder, as it is in the folder's marker.
        session: Ray and client actors of earlier runs of the same command, which are used again; None: this
            run has its own.

    Yields:
        An iterator: one row per round, then a row with the digest of the final tensors.

    Raises:
        ConfigError: The cluster does not answer or cannot hold the actors.
        ClientError: A client failed.
        ClusterError: The driver or all client actors were lost.
    """
    design = setup.design
    keeping = RecordSettings.of(setup, path, resume, claim)
    if (make := design.executor.make) is not None:
        device, small = inline_device(setup, design.cluster)
        if small:
            notify(small)
        with settings_restored():
            executor = make(setup.context, setup.weights, design.failures, device)
        if device != HOST and setup.context.train.pack_texts:
            notify(PADDED)
        with closing(executor):
            watch = _watch_of(session, design, path)
            with closing(record_rounds(setup.experiment, executor, setup.start, keeping, watch)) as rows:
                yield _one_at_a_time(rows, setup.context, device)
    else:
        with (
            nullcontext(session) if session else Session() as own,
            closing(own.rows(setup, keeping, notify)) as rows,
        ):
            yield rows
