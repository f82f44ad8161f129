"""Measures time and memory of the largest client by running it, and checks that the actors fit.

The client runs in a new process, in this one, or on a GPU of the cluster, which says how many client actors
a GPU holds. Files of the run must fit on the disk.
"""

from __future__ import annotations

import multiprocessing
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from rayfed.client_facts import ClientTable
from rayfed.data.examples import bytes_of
from rayfed.data.shards import open_dataset
from rayfed.devices import (
    HOST,
    USABLE,
    chosen_device,
    free_memory,
    peak_memory,
    reserved_memory,
    reset_peak,
    settings_restored,
    total_memory,
)
from rayfed.engine.loop import RoundPlan, cohort_of, score_global
from rayfed.engine.memory import count_cost
from rayfed.engine.setup import Setup
from rayfed.errors import BusyError, ConfigError, DeviceMemoryError, RayFedError, ResourceError, one_line
from rayfed.executors.cluster_config import ClusterConfig
from rayfed.executors.inline import InlineExecutor
from rayfed.executors.worker import ClientContext, Weights
from rayfed.federation.cohort import Cohort
from rayfed.federation.executor import Call, Policy
from rayfed.federation.train_config import TrainConfig, override
from rayfed.mps import CLIENTS, mps_runs
from rayfed.terminal.console import size, stage
from rayfed.types import ServerState, Update, num_bytes

if TYPE_CHECKING:
    from rayfed.executors.cluster import ActorPlan
    from rayfed.executors.connection import Health


SAMPLE_SECONDS = 0.02
"""Seconds between two measurements."""


def own_memory() -> int:
    """Memory in bytes that only this process has (unique set size)."""
    used: int = psutil.Process().memory_full_info().uss
    return used


@contextmanager
def peak_of_process() -> Iterator[list[int]]:
    """Measure the peak memory of this process (unique set size) while the block runs.

    Yields:
        A list with one number, the peak so far in bytes.
    """
    peak = [0]
    over = threading.Event()

    def sample() -> None:
        peak[0] = max(peak[0], own_memory())

    def watch() -> None:
        while not over.wait(SAMPLE_SECONDS):
            sample()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()
        sample()


CONTEXT = 0.6e9
"""Most bytes that CUDA takes of a GPU when it starts in a process, which torch does not count. It is an
estimate: what is taken beyond it belongs to other processes. Used whole where a client ran on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Time and memory of one process that ran one client.

    Attributes:
        client: Id of the client.
        examples: Number of its training examples.
        device: Device of its model.
        first_visit_s: Seconds of its work in the first round, in which caches are filled; on a device with
            groups, its part of those of a whole group.
        visit_s: Seconds of its work in the second round.
        server_s: Seconds of the server's work in the second round.
        scored: Number of test examples that were scored.
        scoring_s: Seconds spent on scoring them.
        memory_bytes: Peak memory of the process without the initial weights, which actors of a node share.
        weights_bytes: Bytes of all initial tensors, needed once per node.
        device_bytes: Memory that an actor takes of a GPU: the measured peak, the frozen features of all other
            clients, and what CUDA took itself; if the client ran on the CPU, an estimate from the memory of
            the process.
        device_total: Memory of the GPU in bytes; 0: the client ran on the CPU.
        device_free: What other processes left free of it before the client ran.
        down_bytes, up_bytes: Bytes that were sent to the client and that it sent back in the second round.
        store_bytes: Bytes of the client's store.
        state_bytes: Bytes of the server's state.
    """

    client: str
    examples: int
    device: str
    first_visit_s: float
    visit_s: float
    server_s: float
    scored: int
    scoring_s: float
    memory_bytes: int
    weights_bytes: int
    device_bytes: int
    device_total: int
    device_free: int
    down_bytes: int
    up_bytes: int
    store_bytes: int
    state_bytes: int


def measure(experiment: RoundPlan, context: ClientContext, on_gpu: bool = False) -> Measurement:
    """Run the largest client for two rounds in a new process, which ends with this call.

    Raises:
        RayFedError: The client failed.
        ResourceError: The process died, or the GPU has too little memory; says what would fit.
    """
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe(duplex=False)
    process = spawning.Process(target=_report, args=(theirs, experiment, context, on_gpu), daemon=True)
    process.start()
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError as err:
        process.join()
        raise ResourceError(
            f"model.name: the process of the measured client died (exit code {process.exitcode}; -9: too "
            f"little memory); try a smaller model or train.batch_size"
        ) from err
    finally:
        process.kill()
        process.join()
    if isinstance(answer, BaseException):
        raise answer
    measured: Measurement = answer
    return measured


def costs(experiment: RoundPlan, train: TrainConfig) -> dict[str, float]:
    """Relative work of every client: examples in all its steps, times the share of the blocks it holds."""
    depth = experiment.depth
    drawn = dict.fromkeys(experiment.clients, (depth + 1) / 2)  # the mean of 1..depth
    held = drawn if experiment.capacity is None else experiment.capacity
    return {
        cid: train.examples(info.num_examples) * (held[cid] / depth if depth else 1.0)
        for cid, info in experiment.clients.items()
    }


def _report(pipe: Any, experiment: RoundPlan, context: ClientContext, on_gpu: bool) -> None:
    try:
        device = "cuda:0" if on_gpu and torch.cuda.is_available() else HOST
        pipe.send(largest_client(experiment, context, torch.device(device)))
    except RayFedError as err:
        pipe.send(err)
    except Exception as err:
        traceback.print_exc()
        pipe.send(RayFedError(f"the measured client failed: {type(err).__name__}: {err}"))


def largest_client(
    experiment: RoundPlan, context: ClientContext, device: torch.device, weights: Weights | None = None
) -> Measurement:
    """Run the largest client for two rounds in this process.

    Args:
        context: What a process needs to run its clients.
        device: Where the client runs.
        weights: All tensors of the initial model; None: they are made here.

    Raises:
        RayFedError: The client failed.
        ResourceError: The device has too little memory; says which changes were tried and fit.
    """
    cid = _largest(costs(experiment, context.train))
    with suppress(DeviceMemoryError):
        return _run_client(experiment, context, device, cid, weights)
    # Tried only now: the traceback of the error, which kept the tensors of the failed visit, is gone.
    examples = experiment.clients[cid].num_examples
    fits = []
    for key, changes in context.smaller.changes(examples).items():
        for train in changes:
            if _fits(experiment, replace(context, train=train), device, cid, weights):
                fits.append(override(train, key))
                break
    raise ResourceError(
        f"cluster.gpus_per_actor: one actor with client {cid!r} needs more than the memory of a whole "
        f"{device.type} device; what would fit: {' or '.join(fits) or 'a smaller model'}"
    )


def _fits(
    experiment: RoundPlan, context: ClientContext, device: torch.device, cid: str, weights: Weights | None
) -> bool:
    try:
        _run_client(experiment, context, device, cid, weights)
    except DeviceMemoryError:
        return False
    return True


def _run_client(
    experiment: RoundPlan, context: ClientContext, device: torch.device, cid: str, weights: Weights | None
) -> Measurement:
    reset_peak(device)
    free, reserved = free_memory(device), reserved_memory(device)
    before = own_memory()
    known = weights or context.weights()
    lane = TimedExecutor(context, known, Policy(watchdog=None), device)
    together = [cid] if device == HOST else _group_of(experiment, context, cid)
    with peak_of_process() as memory:  # begins here, because actors map weights and read no files
        played = _play(experiment, context, lane, together)
    total = sum(array.nbytes for array in known.values())
    there = peak_memory(device)
    if there is None:
        there = max(memory[0] - before, 0) + resident_bytes(context)
    all_there = total_memory(device) or 0
    own = int(CONTEXT) if free is None else min(all_there - free, int(CONTEXT))
    libraries = 0  # of CUDA, which load when they are used
    if free is not None and (rest := free_memory(device)) is not None:
        libraries = max(free - rest - (reserved_memory(device) - reserved), 0)
    return Measurement(
        client=cid,
        examples=experiment.clients[cid].num_examples,
        device=str(device),
        first_visit_s=played.visits[0],
        visit_s=played.visits[1],
        server_s=played.server,
        scored=played.scored,
        scoring_s=lane.seconds,
        memory_bytes=max(memory[0] - total, 0),
        weights_bytes=total,
        device_bytes=there + own + libraries + _other_features(experiment, context, lane),
        device_total=all_there,
        device_free=0 if free is None else free + own,
        down_bytes=played.cohort.ledger.total("down") // len(together),
        up_bytes=played.cohort.ledger.total("up") // len(together),
        store_bytes=sum(num_bytes(kept.value) for client, kept in lane.stores().items() if client == cid),
        state_bytes=sum(map(num_bytes, (played.state.params, played.state.shared, played.state.memory))),
    )


@dataclass(frozen=True, kw_only=True)
class _Played:
    """Seconds of both visits and of the server, its cohort and state in the second round, scored examples."""

    visits: list[float]
    server: float
    scored: int
    cohort: Cohort
    state: ServerState


@settings_restored()
def batches_a_step(setup: Setup) -> float:
    """Training batches that a client takes for each step of `train`; 0: the method trains nothing.

    The client with the fewest examples trains once, in this process: a method may take two batches for a
    step, or train two models.

    Raises:
        RayFedError: The client failed.
    """
    experiment, context = setup.experiment, setup.context
    if not experiment.server.trains:
        return 0.0
    cid = min(experiment.clients, key=lambda name: experiment.clients[name].num_examples)
    lane = TimedExecutor(context, context.weights(), Policy(watchdog=None), torch.device(HOST))
    state = replace(experiment.server.start(lane.worker.start_params()), round=0)
    cohort = _cohort_of(experiment, lane, 0, [cid])
    experiment.server.round(state, cohort, experiment.local)
    return cohort.ledger.steps / context.train.steps(experiment.clients[cid].num_examples)


def _group_of(experiment: RoundPlan, context: ClientContext, cid: str) -> list[str]:
    """A client and the largest other ones, as many as share their passes: a device holds the rows of all."""
    every = costs(experiment, context.train)
    others = sorted((name for name in every if name != cid), key=lambda name: -every[name])
    return [cid, *others][: max(1, min(experiment.group, experiment.clients_per_round))]


def _play(experiment: RoundPlan, context: ClientContext, lane: TimedExecutor, cids: Sequence[str]) -> _Played:
    """Two rounds of clients, and one scoring, whose seconds are those of the lane afterwards."""
    state = experiment.server.start(lane.worker.start_params())
    visits = []
    rest = 0.0
    for r in (0, 1):
        lane.seconds = 0.0
        began = time.perf_counter()
        cohort = _cohort_of(experiment, lane, r, cids)
        state = experiment.server.round(replace(state, round=r), cohort, experiment.local)
        visits.append(lane.seconds / len(cids))
        rest = time.perf_counter() - began - lane.seconds
    lane.seconds = 0.0
    scored = 0
    if experiment.evaluate_every and experiment.sets:
        sizes = {s.id: len(context.splits[s.id]["test"]) for s in experiment.sets}
        chosen = _largest(sizes)
        some = replace(experiment, sets=tuple(s for s in experiment.sets if s.id == chosen))
        score_global(some, _cohort_of(experiment, lane, 1, cids), state)
        scored = sizes[chosen]
    return _Played(visits=visits, server=rest, scored=scored, cohort=cohort, state=state)


def _other_features(experiment: RoundPlan, context: ClientContext, lane: TimedExecutor) -> int:
    """Bytes of the frozen features that an actor will keep of all clients and sets but the measured ones."""
    held = list(lane.worker.cache.values())
    if not (known := sum(map(len, held))):
        return 0
    size = sum(value.nbytes for value in held)
    every = sum(info.num_examples for info in experiment.clients.values())
    every += sum(len(context.splits[scored.id]["test"]) for scored in experiment.sets)
    return max(0, int(min(context.train.cache_memory, size / known * every)) - size)


def resident_bytes(context: ClientContext) -> int:
    """Bytes of the examples that an actor would copy to a GPU with much free memory."""
    if context.resident is False:
        return 0
    dataset = open_dataset(context.shard)
    need = bytes_of(dataset.images, dataset.targets, context.splits)
    return need if context.resident is True or need <= context.resident_bytes else 0


def _cohort_of(experiment: RoundPlan, lane: TimedExecutor, round: int, cids: Sequence[str]) -> Cohort:
    """A cohort of these clients, which are also the only clients of the experiment."""
    cohort = cohort_of(experiment, lane, round, tuple(cids))
    only = ClientTable.of({cid: experiment.clients[cid] for cid in cids})
    held = experiment.capacity or dict.fromkeys(only, max((experiment.depth + 1) // 2, 1))
    return replace(cohort, clients=only, capacity=held)


def _largest(sizes: Mapping[str, float]) -> str:
    """Name with the largest size, the first one of several."""
    return max(sizes, key=lambda name: sizes[name])


class TimedExecutor(InlineExecutor):
    """Runs calls in this process, as an actor does, and adds up their seconds."""

    seconds = 0.0

    def map(self, calls: Sequence[Call]) -> list[Update | None]:
        began = time.perf_counter()
        updates = super().map(calls)
        self.seconds += time.perf_counter() - began
        return updates


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
    work = _work_of_example(setup)
    if work is None or work >= WORTH:
        return ""
    return (
        f"clients run on the CPU, which is faster than a GPU with so little work for each example: "
        f"{work / 1e9:.2g} GFLOP (under {WORTH / 1e9:g}); "
        f"{kind.key_for_gpu} uses a GPU all the same"
    )


def _work_of_example(setup: Setup) -> float | None:
    """Operations of training on one example, with all blocks; None: a part of the model cannot be counted."""
    context = setup.context
    whole = replace(context, train=replace(context.train, cache_features=False))  # they are computed once
    cost = count_cost(context.skeleton(), whole, None, 0)
    if cost is None:
        return None
    load = cost.load(None)
    return load.row + load.step / context.train.batch_size


def work_of_largest(setup: Setup) -> str:
    """The largest client, its examples, and the operations of one of its visits, for the user."""
    sizes = costs(setup.experiment, setup.context.train)
    client = _largest(sizes)
    examples = setup.context.train.examples(setup.experiment.clients[client].num_examples)
    work = (_work_of_example(setup) or 0.0) * examples / 1e9
    operations = f", up to {work:,.0f} GFLOP" if work >= 1 else ""
    return f"{client} with {examples:,} examples{operations} each time"


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


def measured_on_gpu(
    setup: Setup, weights: Any, cluster: ClusterConfig, health: Health
) -> tuple[Measurement, bool] | None:
    """Run the largest client on a GPU of the cluster, which is reserved meanwhile.

    Args:
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

    from rayfed.executors.cluster import FINEST, ActorPlan, reserve

    with reserve(ActorPlan(actors=1, cpus=1 / FINEST, gpus=1.0), cluster.connect_timeout, health) as (
        options,
    ):
        task = ray.remote(max_calls=1)(_visit).options(**options, max_retries=0)
        reference = task.remote(setup.experiment, setup.context, weights)
        health.wait(reference)
        try:
            measured: tuple[Measurement, bool] | None = ray.get(reference)
        except ray.exceptions.RayTaskError as err:
            raise (err.cause if isinstance(err.cause, RayFedError) else err) from err
        except ray.exceptions.RayError as err:
            died = f"{type(err).__name__}: {one_line(err)}"
            raise ResourceError(
                f"model.name: the process of the measured client died ({died[:200]}); try a smaller model or "
                f"train.batch_size"
            ) from err
        return measured


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


def _visit(
    experiment: RoundPlan, context: ClientContext, weights: Weights
) -> tuple[Measurement, bool] | None:
    if not torch.cuda.is_available():
        return None
    return largest_client(experiment, context, torch.device("cuda:0"), weights), mps_runs()
