"""Measures time and memory of the largest client by running it: in a new process, or in this one."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rayfed.clients import ClientTable
from rayfed.data.examples import bytes_of
from rayfed.data.shards import open_dataset
from rayfed.devices import HOST, free_memory, peak_memory, reserved_memory, reset_peak, total_memory
from rayfed.engine.loop import Experiment, make_cohort, score_global
from rayfed.engine.process_memory import own_memory, peak_of_process
from rayfed.errors import DeviceMemoryError, RayFedError, ResourceError
from rayfed.executors.failures import Policy
from rayfed.executors.inline import InlineExecutor
from rayfed.executors.worker import Weights, World
from rayfed.federation.cohort import Cohort
from rayfed.federation.executor import Call
from rayfed.federation.less_memory import override
from rayfed.federation.train_config import TrainConfig
from rayfed.types import ServerState, Update, num_bytes

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
        first_visit_s: Seconds of its work in the first round, in which caches are filled.
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


def measure(experiment: Experiment, world: World, on_gpu: bool = False) -> Measurement:
    """Run the largest client for two rounds in a new process, which ends with this call.

    Raises:
        RayFedError: The client failed.
        ResourceError: The process died, or the GPU has too little memory; says what would fit.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(theirs, experiment, world, on_gpu), daemon=True)
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


def costs(experiment: Experiment, train: TrainConfig) -> dict[str, float]:
    """Relative work of every client: examples in all its steps, times the share of the blocks it holds."""
    depth = experiment.depth
    drawn = dict.fromkeys(experiment.clients, (depth + 1) / 2)  # the mean of 1..depth
    held = drawn if experiment.capacity is None else experiment.capacity
    return {
        cid: train.examples(info.num_examples) * (held[cid] / depth if depth else 1.0)
        for cid, info in experiment.clients.items()
    }


def _report(pipe: Any, experiment: Experiment, world: World, on_gpu: bool) -> None:
    try:
        device = "cuda:0" if on_gpu and torch.cuda.is_available() else HOST
        pipe.send(largest_client(experiment, world, torch.device(device)))
    except RayFedError as err:
        pipe.send(err)
    except Exception as err:
        traceback.print_exc()
        pipe.send(RayFedError(f"the measured client failed: {type(err).__name__}: {err}"))


def largest_client(
    experiment: Experiment, world: World, device: torch.device, weights: Weights | None = None
) -> Measurement:
    """Run the largest client for two rounds in this process.

    Args:
        experiment: The experiment.
        world: What a process needs to run its clients.
        device: Where the client runs.
        weights: All tensors of the initial model; None: they are made here.

    Raises:
        RayFedError: The client failed.
        ResourceError: The device has too little memory; says which changes were tried and fit.
    """
    cid = _largest(costs(experiment, world.train))
    with suppress(DeviceMemoryError):
        return _run_client(experiment, world, device, cid, weights)
    # Tried only now: the traceback of the error, which kept the tensors of the failed visit, is gone.
    examples = experiment.clients[cid].num_examples
    fits = []
    for key, changes in world.smaller.changes(examples).items():
        for train in changes:
            if _fits(experiment, replace(world, train=train), device, cid, weights):
                fits.append(override(train, key))
                break
    raise ResourceError(
        f"cluster.gpus_per_actor: one actor with client {cid!r} needs more than the memory of a whole "
        f"{device.type} device; what would fit: {' or '.join(fits) or 'a smaller model'}"
    )


def _fits(
    experiment: Experiment, world: World, device: torch.device, cid: str, weights: Weights | None
) -> bool:
    try:
        _run_client(experiment, world, device, cid, weights)
    except DeviceMemoryError:
        return False
    return True


def _run_client(
    experiment: Experiment, world: World, device: torch.device, cid: str, weights: Weights | None
) -> Measurement:
    reset_peak(device)
    free, reserved = free_memory(device), reserved_memory(device)
    before = own_memory()
    known = weights or world.weights()
    lane = _Lane(world, known, Policy(watchdog=None), device)
    with peak_of_process() as memory:  # begins here, because actors map weights and read no files
        played = _play(experiment, world, lane, cid)
    total = sum(array.nbytes for array in known.values())
    there = peak_memory(device)
    if there is None:
        there = max(memory[0] - before, 0) + resident_bytes(world)
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
        device_bytes=there + own + libraries + _other_features(experiment, world, lane),
        device_total=all_there,
        device_free=0 if free is None else free + own,
        down_bytes=played.cohort.ledger.total("down"),
        up_bytes=played.cohort.ledger.total("up"),
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


def _play(experiment: Experiment, world: World, lane: _Lane, cid: str) -> _Played:
    """Two rounds of a client, and one scoring, whose seconds are those of the lane afterwards."""
    state = experiment.server.start(lane.worker.start_params())
    visits = []
    rest = 0.0
    for r in (0, 1):
        lane.seconds = 0.0
        began = time.perf_counter()
        cohort = _cohort_of_one(experiment, lane, r, cid)
        state = experiment.server.round(replace(state, round=r), cohort, experiment.local)
        visits.append(lane.seconds)
        rest = time.perf_counter() - began - lane.seconds
    lane.seconds = 0.0
    scored = 0
    if experiment.evaluate_every and experiment.sets:
        sizes = {s.id: len(world.splits[s.id]["test"]) for s in experiment.sets}
        chosen = _largest(sizes)
        some = replace(experiment, sets=tuple(s for s in experiment.sets if s.id == chosen))
        score_global(some, _cohort_of_one(experiment, lane, 1, cid), state)
        scored = sizes[chosen]
    return _Played(visits=visits, server=rest, scored=scored, cohort=cohort, state=state)


def _other_features(experiment: Experiment, world: World, lane: _Lane) -> int:
    """Bytes of the frozen features that an actor will keep of all clients and sets but the measured ones."""
    held = list(lane.worker.cache.values())
    if not (known := sum(map(len, held))):
        return 0
    size = sum(value.nbytes for value in held)
    every = sum(info.num_examples for info in experiment.clients.values())
    every += sum(len(world.splits[scored.id]["test"]) for scored in experiment.sets)
    return max(0, int(min(world.train.cache_memory, size / known * every)) - size)


def resident_bytes(world: World) -> int:
    """Bytes of the examples that an actor would copy to a GPU with much free memory."""
    if world.resident is False:
        return 0
    dataset = open_dataset(world.shard)
    need = bytes_of(dataset.images, np.asarray(dataset.targets), world.splits)
    return need if world.resident is True or need <= world.resident_bytes else 0


def _cohort_of_one(experiment: Experiment, lane: _Lane, round: int, client: str) -> Cohort:
    """A cohort of one client, which is also the only client of the experiment."""
    cohort = make_cohort(experiment, lane, round)
    only = ClientTable.of({client: experiment.clients[client]})
    held = experiment.capacity or dict.fromkeys(only, max((experiment.depth + 1) // 2, 1))
    return replace(cohort, ids=(client,), clients=only, capacity=held)


def _largest(sizes: Mapping[str, float]) -> str:
    """Name with the largest size, the first one of several."""
    return max(sizes, key=lambda name: sizes[name])


class _Lane(InlineExecutor):
    """Runs calls in this process, as an actor does, and adds up their seconds."""

    seconds = 0.0

    def map(self, calls: Sequence[Call]) -> list[Update | None]:
        began = time.perf_counter()
        updates = super().map(calls)
        self.seconds += time.perf_counter() - began
        return updates
