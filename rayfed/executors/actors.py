"""Calls on a pool of Ray actors: clients are data, actors are lanes with a share of a CPU and of a GPU."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError

from rayfed.cohort import Call, Task
from rayfed.errors import ClientError, RayFedError
from rayfed.executors.wire import Packed, decode, decode_update, encode, encode_update, pack, unpack
from rayfed.types import Broadcast, Update, num_bytes
from rayfed.worker import Weights, Worker, World

log = logging.getLogger(__name__)

IN_FLIGHT = 2  # chunks per actor: one running, one already waiting there
LARGEST_CHUNK = 16
SHARED_BY_REFERENCE = 100_000  # bytes; Ray copies smaller values into the call itself


@dataclass(frozen=True)
class Slot:
    """Stands for an argument of the remote call, which Ray delivers from the object store."""

    index: int


@dataclass(frozen=True)
class WireCall:
    """A call whose large parts are arguments of the remote call."""

    client: str
    task: Task
    tag: str
    round: int
    blocks: tuple[int, ...] | None
    params: Slot
    shared: dict[str, Any]
    store: Slot | None


class ClientActor:
    """One lane: a resident backbone that plays any client, one after the other."""

    def __init__(self, name: str, world: World, weights: Weights) -> None:
        self._name = name
        gpus = ray.get_gpu_ids()
        usable = bool(gpus) and torch.cuda.is_available()
        if gpus and not usable:
            log.warning("%s was given GPU %s but torch sees none; it runs on the CPU", name, gpus)
        self._worker = Worker(world, weights, "cuda:0" if usable else "cpu")

    def __repr__(self) -> str:
        return self._name

    def run(self, calls: list[WireCall], *args: Any) -> tuple[Any, ...]:
        """Play clients one after the other.

        Returns:
            The answers of all calls (an update and whether the client keeps a store, or its error), then the
            store of each client, so that the driver can leave stores in the object store.
        """
        answers: list[tuple[tuple[Update, Packed], bool] | RayFedError] = []
        stores: list[Any] = []
        sent_params: dict[int, dict[str, torch.Tensor]] = {}
        for call in calls:
            slot = call.params.index
            if slot not in sent_params:
                sent_params[slot] = unpack(args[slot])
            shared = {k: args[v.index] if isinstance(v, Slot) else v for k, v in call.shared.items()}
            sent = Broadcast(
                round=call.round, params=sent_params[slot], shared=decode(shared), blocks=call.blocks
            )
            before = decode(args[call.store.index], copy=True) if call.store else {}
            try:
                update, store = self._worker.call(Call(call.client, call.task, call.tag, sent), before)
            except RayFedError as err:
                answers.append(err)
                stores.append(None)
            else:
                answers.append((encode_update(update), bool(store)))
                stores.append(encode(store))
        return answers, *stores

    def checksum(self) -> str:
        return self._worker.checksum()

    def where(self) -> dict[str, Any]:
        """Node and process of this lane."""
        context = ray.get_runtime_context()
        return {"name": self._name, "node": context.get_node_id(), "worker": context.get_worker_id()}


@dataclass(eq=False)
class Lane:
    """An actor and what it still has to do.

    Attributes:
        name: Name of the actor.
        actor: Its handle.
        options: Ray options it was started with.
        own: Calls only this lane may run (an actor per client).
        busy: Chunks it has been given.
    """

    name: str
    actor: Any
    options: dict[str, Any]
    own: deque[int] = field(default_factory=deque)
    busy: int = 0


@dataclass(frozen=True)
class Job:
    """A chunk under way."""

    lane: Lane
    indices: list[int]
    stores: list[Any]


class RayExecutor:
    """Any lane may run any client: stores travel with the call and rest in the object store between rounds.

    An actor that dies is replaced and its chunk is given out again, which is exact because calls are pure.
    """

    def __init__(
        self,
        world: World,
        weights: Any,
        names: Sequence[str],
        options: Sequence[dict[str, Any]],
        retries: int = 2,
    ) -> None:
        """Start the actors.

        Args:
            world: What the actors need to play clients.
            weights: Object reference of the start tensors.
            names: One actor each; a client of the same name (after the last colon) always runs there.
            options: Ray options of each actor: num_cpus, num_gpus, scheduling_strategy.
            retries: How often a call is given out again after its actor died.
        """
        self._world, self._weights = ray.put(world), weights
        self.retries = retries
        self._stores: dict[str, Any] = {}
        self._lanes = [
            Lane(name, self._start(name, own), own) for name, own in zip(names, options, strict=True)
        ]
        self._home = {lane.name.rsplit(":", 1)[-1]: lane for lane in self._lanes}
        self.replaced = 0

    def _start(self, name: str, options: dict[str, Any]) -> Any:
        actor = ray.remote(ClientActor).options(max_restarts=0, max_task_retries=0, **options)
        return actor.remote(name, self._world, self._weights)

    def map(self, calls: Sequence[Call]) -> list[Update]:
        """Answers in the order of the calls, whichever lane ran them and whenever it finished.

        Raises:
            ClientError: A client failed, or its actors died more often than `retries` allows.
        """
        return Exchange(calls, self._lanes, self._home, self._stores, self).run()

    def replace(self, lane: Lane) -> None:
        """Start a new actor in the place of a dead one."""
        log.warning("actor %s died; a new one takes its place and repeats the work", lane.name)
        self.replaced += 1
        lane.actor, lane.busy = self._start(lane.name, lane.options), 0

    def where(self) -> list[dict[str, Any]]:
        """Node and process of every lane."""
        return ray.get([lane.actor.where.remote() for lane in self._lanes])

    def checksums(self) -> list[str]:
        """Digest of the frozen weights as every lane sees them."""
        return ray.get([lane.actor.checksum.remote() for lane in self._lanes])

    def close(self) -> None:
        for lane in self._lanes:
            ray.kill(lane.actor)


class Exchange:
    """One exchange on a pool: longest calls first, small chunks last, answers by index."""

    def __init__(
        self,
        calls: Sequence[Call],
        lanes: Sequence[Lane],
        home: dict[str, Lane],
        stores: dict[str, Any],
        pool: RayExecutor,
    ) -> None:
        self._calls, self._lanes, self._home, self._stores, self._pool = calls, lanes, home, stores, pool
        self._refs: dict[int, Any] = {}
        self._keep: list[object] = []  # what `_refs` is keyed by must stay alive
        self._answers: list[Update | None] = [None] * len(calls)
        self._tries = [0] * len(calls)
        self._running: dict[Any, Job] = {}
        self._free: deque[int] = deque()
        for i in sorted(range(len(calls)), key=lambda i: -calls[i].cost):
            self._enqueue(i)

    def run(self) -> list[Update]:
        try:
            while self._hand_out() or self._running:
                done, _ = ray.wait(list(self._running), num_returns=1)
                self._receive(done[0])
        finally:
            for lane in self._lanes:
                lane.own.clear()
                lane.busy = 0
        return [answer for answer in self._answers if answer is not None]

    def _enqueue(self, i: int) -> None:
        lane = self._home.get(self._calls[i].client)
        (lane.own if lane else self._free).append(i)

    def _hand_out(self) -> bool:
        """Give work to every lane that can take some; whether anything is left to give."""
        for load in range(IN_FLIGHT):
            for lane in self._lanes:
                if lane.busy == load and (chunk := self._chunk(lane)):
                    self._submit(lane, chunk)
        return bool(self._free) or any(lane.own for lane in self._lanes)

    def _chunk(self, lane: Lane) -> list[int]:
        queue = lane.own or self._free
        shared_by = 1 if queue is lane.own else len(self._lanes)
        size = min(LARGEST_CHUNK, max(1, len(queue) // (2 * shared_by)))
        return [queue.popleft() for _ in range(min(size, len(queue)))]

    def _submit(self, lane: Lane, chunk: list[int]) -> None:
        args: list[Any] = []
        slots: dict[Any, Slot] = {}

        def slot(ref: Any) -> Slot:
            if ref not in slots:
                slots[ref] = Slot(len(args))
                args.append(ref)
            return slots[ref]

        wire = []
        for i in chunk:
            call, sent = self._calls[i], self._calls[i].sent
            shared = {
                k: slot(self._reference(v, encode)) if num_bytes(v) > SHARED_BY_REFERENCE else encode(v)
                for k, v in sent.shared.items()
            }
            params, store = slot(self._reference(sent.params, pack)), self._stores.get(call.client)
            home = slot(store) if store is not None else None
            wire.append(
                WireCall(call.client, call.task, call.tag, sent.round, sent.blocks, params, shared, home)
            )
            self._tries[i] += 1
        returns: list[Any] = lane.actor.run.options(num_returns=1 + len(chunk)).remote(wire, *args)
        self._running[returns[0]] = Job(lane, chunk, returns[1:])
        lane.busy += 1

    def _reference(self, value: Any, encoder: Any) -> Any:
        """Put a value into the object store once per exchange, however many clients receive it."""
        if id(value) not in self._refs:
            self._refs[id(value)] = ray.put(encoder(value))
            self._keep.append(value)
        return self._refs[id(value)]

    def _receive(self, done: Any) -> None:
        job = self._running.pop(done)
        try:
            answers = ray.get(done)
        except RayActorError as err:
            self._requeue(job, err)
            return
        job.lane.busy -= 1
        for i, answer, store in zip(job.indices, answers, job.stores, strict=True):
            if isinstance(answer, RayFedError):
                raise answer
            update, keeps = answer
            self._answers[i] = decode_update(update)
            if keeps:
                self._stores[self._calls[i].client] = store
            else:
                self._stores.pop(self._calls[i].client, None)

    def _requeue(self, job: Job, err: RayActorError) -> None:
        lost = [ref for ref, other in self._running.items() if other.lane is job.lane]
        jobs = [job, *(self._running.pop(ref) for ref in lost)]
        for i in itertools.chain.from_iterable(j.indices for j in jobs):
            call = self._calls[i]
            if self._tries[i] > self._pool.retries:
                cause = f"its actor died {self._tries[i]} times; {type(err).__name__}: {err}".splitlines()[0]
                raise ClientError(call.client, call.sent.round, call.tag, cause, str(err))
            self._enqueue(i)
        self._pool.replace(job.lane)
