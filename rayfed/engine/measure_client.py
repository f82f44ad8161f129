"""Measures time and memory of the largest client by running it, here, in a new process or on a GPU."""

from __future__ import annotations

import multiprocessing
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psutil
import torch

from rayfed.client_facts import ClientTable
from rayfed.data.examples import bytes_of
from rayfed.data.shards import open_dataset
from rayfed.devices import (
    HOST,
    free_memory,
    peak_memory,
    reserved_memory,
    reset_peak,
    total_memory,
)
from rayfed.engine.loop import RoundPlan, cohort_of, score_global
from rayfed.engine.setup import Setup
from rayfed.errors import DeviceMemoryError, RayFedError, ResourceError, one_line
from rayfed.executors.cluster_config import ClusterConfig
from rayfed.executors.inline import InlineExecutor
from rayfed.executors.worker import ClientContext, Weights
from rayfed.federation.cohort import Cohort
from rayfed.federation.executor import Call, Policy
from rayfed.federation.train_config import TrainConfig, override
from rayfed.mps import mps_runs
from rayfed.types import ServerState, Update, num_bytes

if TYPE_CHECKING:
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
    cid = largest(costs(experiment, context.train))
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
        chosen = largest(sizes)
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


def largest(sizes: Mapping[str, float]) -> str:
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


def _visit(
    experiment: RoundPlan, context: ClientContext, weights: Weights
) -> tuple[Measurement, bool] | None:
    if not torch.cuda.is_available():
        return None
    return largest_client(experiment, context, torch.device("cuda:0"), weights), mps_runs()
