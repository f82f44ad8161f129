"""One exchange with the clients of a round on a pool of actors, and what is done when some of it fails."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    WorkerCrashedError,
)

from rayfed.errors import ClientError, ClusterError, LostStoreError, RayFedError, StoppedError
from rayfed.executors.failures import action_for, event_of
from rayfed.executors.lane import Job, Lane, Pool, Slot, WireCall
from rayfed.executors.stacks import silence
from rayfed.executors.startup import StartProgress
from rayfed.executors.wire import decode_update, encode, pack
from rayfed.federation.executor import Call, Event, Visit
from rayfed.types import Update, num_bytes

log = logging.getLogger(__name__)

IN_FLIGHT = 2  # chunks per actor: one running, one already waiting there
LARGEST_CHUNK = 16
SHARED_BY_REFERENCE = 100_000  # bytes; Ray copies smaller values into the call itself
TICK = 0.5  # seconds between two looks at the clock and at whether to stop
LOST = (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError)  # Ray's ways to say it


class Exchange:
    """Longest calls first, small chunks last, answers by index."""

    def __init__(self, calls: Sequence[Call], pool: Pool) -> None:
        self._calls, self._pool, self._policy = calls, pool, pool.policy
        self._refs: dict[int, Any] = {}
        self._keep: list[object] = []  # what `_refs` is keyed by must stay alive
        self._answers: dict[int, Update | None] = {}
        self._tries = [0] * len(calls)
        self._running: dict[Any, Job] = {}
        self._free: deque[int] = deque()
        self._heard, self._silent = time.monotonic(), False
        self._progress = StartProgress()
        for i in sorted(range(len(calls)), key=lambda i: -calls[i].cost):
            self._enqueue(i)

    def run(self) -> list[Update | None]:
        try:
            if not self._pool.lanes:  # an earlier exchange lost the last one
                raise ClusterError("no client actor is left")
            while len(self._answers) < len(self._calls):
                self._hand_out()
                self._wait()
        except LostStoreError:
            for lane in self._pool.lanes:
                if lane.busy:  # what it still does belongs to nobody
                    ray.kill(lane.actor)
                    self._pool.replace(lane)
            raise
        finally:
            for lane in self._pool.lanes:
                lane.own.clear()
                lane.busy = 0
        return [self._answers[i] for i in range(len(self._calls))]

    def wait_until_up(self) -> None:
        """Wait for every actor that is starting; one that dies meanwhile is replaced, as in a round.

        Raises:
            ClusterError: No actor is left.
        """
        while any(lane.starting is not None for lane in self._pool.lanes):
            self._wait()

    def _enqueue(self, i: int) -> None:
        lane = self._pool.home.get(self._calls[i].client)
        (lane.own if lane else self._free).append(i)

    def _hand_out(self) -> None:
        """Give work to every lane that can take some."""
        for load in range(IN_FLIGHT):
            for lane in self._pool.lanes:
                if lane.starting is None and lane.busy == load and (chunk := self._chunk(lane)):
                    self._submit(lane, chunk)

    def _chunk(self, lane: Lane) -> list[int]:
        queue = lane.own or self._free
        shared_by = 1 if queue is lane.own else len(self._pool.lanes)
        # With a limit for each client, every client is a chunk of its own, so that its time can be told.
        largest = 1 if self._policy.client_timeout else LARGEST_CHUNK
        size = min(largest, max(1, len(queue) // (2 * shared_by)))
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
            params, store = slot(self._reference(sent.params, pack)), self._pool.reference(call.client)
            home = slot(store) if store is not None else None
            wire.append(
                WireCall(call.client, call.task, call.tag, sent.round, sent.blocks, params, shared, home)
            )
            self._tries[i] += 1
        # The name in Ray's dashboard: Ray keeps some ten time series for every name that it has ever seen.
        run = lane.actor.run.options(num_returns=1 + len(chunk), name=wire[0].tag)
        returns: list[Any] = run.remote(wire, *args)
        self._running[returns[0]] = Job(lane, chunk, returns[1:], time.monotonic())
        if not lane.busy:
            lane.since = time.monotonic()
        lane.busy += 1

    def _reference(self, value: Any, encoder: Any) -> Any:
        """Put a value into the object store once per exchange, however many clients receive it."""
        if id(value) not in self._refs:
            self._refs[id(value)] = ray.put(encoder(value))
            self._keep.append(value)
        return self._refs[id(value)]

    def _wait(self) -> None:
        """Take whatever comes next, and look at the clock."""
        starting = {lane.starting: lane for lane in self._pool.lanes if lane.starting is not None}
        done, _ = ray.wait([*self._running, *starting], num_returns=1, timeout=TICK)
        if self._pool.stopped.is_set():
            raise StoppedError("asked to end")
        for ref in done:
            self._heard, self._silent = time.monotonic(), False
            if ref in starting:
                self._arrive(starting[ref])
            else:
                self._receive(ref)
        self._look_at_clock(time.monotonic())

    def _arrive(self, lane: Lane) -> None:
        try:
            lane.place = ray.get(lane.starting)
        except LOST as err:
            lane.failed_starts += 1
            if lane.failed_starts > self._policy.retries:
                self._retire(lane, f"{type(err).__name__}: {err}".splitlines()[0])
            else:
                self._pool.replace(lane)
        else:
            lane.starting, lane.failed_starts, lane.since = None, 0, time.monotonic()

    def _receive(self, done: Any) -> None:
        job = self._running.pop(done)
        try:
            answers = ray.get(done)
        except LOST as err:
            self._lose(job, err)
            return
        except ObjectLostError as err:
            self._recover(job, err)
            return
        now, worked = time.monotonic(), sum(a[2] for a in answers if isinstance(a, tuple))
        job.lane.busy, job.lane.since = job.lane.busy - 1, now
        waited = max(0.0, now - job.began - worked) / len(job.indices)
        for i, answer, store in zip(job.indices, answers, job.stores, strict=True):
            if isinstance(answer, ClientError):
                self._fail(i, answer, answer.kind)
            elif isinstance(answer, RayFedError):
                raise answer
            else:
                update, keeps, seconds = answer
                self._answers[i] = decode_update(update)
                call = self._calls[i]
                self._pool.keep(call.client, store if keeps else None)
                self._pool.on_visit(Visit(call.client, call.tag, seconds, waited))

    def _fail(self, i: int, err: ClientError, kind: str, lost: bool = False) -> None:
        action = action_for(self._policy, self._tries[i], lost)
        self._pool.on_event(event_of(err, kind, action, self._tries[i]))
        if action == "raise":
            raise err
        if action == "retry":
            self._enqueue(i)
        else:
            self._answers[i] = None

    def _lose(self, job: Job, err: Exception) -> None:
        """The actor of a chunk is gone: replace it, and give out again what it had."""
        waiting = [ref for ref, other in self._running.items() if other.lane is job.lane]
        jobs = [job, *(self._running.pop(ref) for ref in waiting)]
        self._pool.replace(job.lane)
        kind = "out_of_memory" if isinstance(err, OutOfMemoryError) else "actor_lost"
        for i in itertools.chain.from_iterable(j.indices for j in jobs):
            call = self._calls[i]
            cause = f"its actor was lost {self._tries[i]} times; {type(err).__name__}: {err}".splitlines()[0]
            self._fail(
                i, ClientError(call.client, call.sent.round, call.tag, cause, str(err)), kind, lost=True
            )

    def _recover(self, job: Job, err: ObjectLostError) -> None:
        """Something was on a node that is gone. An answer can be made again, a client's store can not."""
        job.lane.busy -= 1
        for i in job.indices:
            call = self._calls[i]
            store = self._pool.reference(call.client)
            try:
                if store is not None:
                    ray.get(store)
            except ObjectLostError as lost:
                raise LostStoreError(call.client) from lost
            cause = f"its answer was lost: {type(err).__name__}"
            self._fail(
                i, ClientError(call.client, call.sent.round, call.tag, cause, str(err)), "actor_lost", True
            )

    def _look_at_clock(self, now: float) -> None:
        limit, watchdog = self._policy.client_timeout, self._policy.watchdog
        for lane in list(self._pool.lanes):
            if lane.starting is not None and self._is_stuck(lane):
                why = f"its process is not up, and did not get on for {self._policy.patience:g} s"
                self._retire(lane, why)
            elif limit and lane.starting is None and lane.busy and now - lane.since > limit:
                self._time_out(lane, limit)
        if watchdog and not self._silent and now - self._heard > watchdog:
            self._silent = True
            self._name_the_awaited(watchdog)

    def _is_stuck(self, lane: Lane) -> bool:
        """Whether an actor that is starting got nowhere for too long, be the machine as busy as it likes."""
        up = (other.place["pid"] for other in self._pool.lanes if other.starting is None)
        if self._progress.since(lane.since, up) <= self._policy.patience:
            return False
        return not ray.wait([lane.starting], timeout=0)[0]  # it may be up, and we have only not looked yet

    def _time_out(self, lane: Lane, limit: float) -> None:
        """End a client that takes too long; what waited behind it on its actor goes elsewhere."""
        refs = [ref for ref, job in self._running.items() if job.lane is lane]
        late, *waiting = (self._running.pop(ref) for ref in refs)
        ray.kill(lane.actor)
        self._pool.replace(lane)
        for i in itertools.chain.from_iterable(job.indices for job in waiting):
            self._tries[i] -= 1
            self._enqueue(i)
        for i in late.indices:
            call = self._calls[i]
            cause = f"no answer within client_timeout={limit:g} s"
            self._fail(i, ClientError(call.client, call.sent.round, call.tag, cause), "timeout")

    def _retire(self, lane: Lane, why: str) -> None:
        self._pool.retire(lane)
        self._pool.on_event(Event(kind="lane_lost", action="drop", message=f"{lane.name}: {why}"))
        log.warning("going on without actor %s: %s", lane.name, why)
        self._free.extend(lane.own)
        if not self._pool.lanes:
            raise ClusterError(f"no client actor is left; the last one, {lane.name}: {why}")

    def _name_the_awaited(self, watchdog: float) -> None:
        """Say who has not answered, where it runs and what it is doing."""
        jobs = {job.lane: job for job in reversed(self._running.values())}
        awaited = {lane: [self._calls[i].client for i in job.indices] for lane, job in jobs.items()}
        starting = [lane for lane in self._pool.lanes if lane.starting is not None]
        event = silence(watchdog, self._calls[0] if self._calls else None, awaited, starting)
        log.warning("%s\n%s", event.message, event.trace)
        self._pool.on_event(event)
