"""Runs the calls of clients on a pool of Ray actors, each with a share of a CPU and of a GPU.

Large parts of messages are put into the object store once per exchange. Clients that do not answer are named
with the current stacks of their processes. The private stores of clients rest in the object store and beyond
its budget on disk.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle, exceptions
from ray.exceptions import ObjectLostError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayfed.errors import (
    ClientError,
    ClusterError,
    DeviceError,
    LostStoreError,
    RayFedError,
    ResourceError,
    StoppedError,
    one_line,
    printable,
)
from rayfed.executors.actor_state import ActorHandle, Job, Pace, StartProgress, WireCall
from rayfed.executors.client_actor import ClientActor
from rayfed.executors.cluster import has_lost_its_node, reserve_again
from rayfed.executors.wire import decode, decode_updates, encode, has_same_content, pack
from rayfed.federation.client import Client
from rayfed.federation.executor import (
    Call,
    CallTiming,
    ClientTask,
    Event,
    Kept,
    Policy,
    action_for,
    event_of,
    units,
)
from rayfed.types import Broadcast, Params, Update, num_bytes

SHARED_BY_REFERENCE = 100_000  # bytes; Ray copies smaller values into the call itself


class SentTensors:
    """References of the tensors that the last exchanges sent, for exchanges that send the same ones again.

    Scores of a round and the training of the next one send the same global tensors. Each node gets them once.
    """

    def __init__(self) -> None:
        self._now: dict[Any, Any] = {}
        self._before: dict[Any, Any] = {}

    def begin(self) -> None:
        """Begin an exchange; what neither this nor the last one sends is freed."""
        self._before, self._now = self._now, {}

    def reference(self, params: Params) -> Any:
        """The reference of these tensors, packed: that of before, if their bytes are still the same."""
        key = tuple((name, id(value)) for name, value in params.items())
        if key not in self._now:  # an exchange changes none of its tensors, and keeps them
            packed, known = pack(params), self._before.get(key)
            is_same = known is not None and has_same_content(ray.get(known), packed)
            self._now[key] = known if is_same else ray.put(packed)
        return self._now[key]


class Outbox:
    """Turns the calls of an exchange into messages."""

    def __init__(self, tensors: SentTensors) -> None:
        """Args: tensors: what was sent before."""
        tensors.begin()
        self._tensors = tensors
        self._refs: dict[int, Any] = {}
        self._tasks: dict[int, bytes] = {}
        self._keep: list[object] = []  # objects whose ids are keys of these must stay alive

    def message(self, call: Call, store: Any, place: Callable[[Any], int]) -> WireCall:
        """The message for a call.

        Args:
            store: Reference of the client's store; None: it keeps nothing.
            place: Makes a reference an argument of the remote call; returns its place among these.
        """
        sent = call.sent
        large = {k for k, v in sent.shared.items() if num_bytes(v) > SHARED_BY_REFERENCE}
        small = {k: None if k in large else encode(v) for k, v in sent.shared.items()}
        return WireCall(
            call=replace(call, task=_no_task, sent=replace(sent, params={}, shared=small)),
            task=self._task(call.task),
            params=place(self._params(sent.params)),
            shared={k: place(self._reference(sent.shared[k])) for k in small if k in large},
            store=None if store is None else place(store),
        )

    def _task(self, task: ClientTask) -> bytes:
        if id(task) not in self._tasks:
            self._tasks[id(task)] = cloudpickle.dumps(task)
            self._keep.append(task)
        return self._tasks[id(task)]

    def _params(self, params: Params) -> Any:
        if id(params) not in self._refs:
            self._refs[id(params)] = self._tensors.reference(params)
            self._keep.append(params)
        return self._refs[id(params)]

    def _reference(self, value: Any) -> Any:
        if id(value) not in self._refs:
            self._refs[id(value)] = ray.put(encode(value))
            self._keep.append(value)
        return self._refs[id(value)]


def _no_task(client: Client, sent: Broadcast) -> Update:
    """Stands for the task in a message, where the task is pickled apart."""
    raise AssertionError("the task of a call was not put back")


MOST_STACKS = 4  # largest number of actors whose stack is shown
PATIENCE = 20.0  # seconds for one stack


def stack(place: Mapping[str, Any]) -> str:
    """The Python stacks of a process of this cluster, or a line that says why they cannot be read."""
    try:
        if place["node"] == ray.get_runtime_context().get_node_id():
            return _dump(place["pid"])
        there = NodeAffinitySchedulingStrategy(place["node"], soft=False)
        task = ray.remote(_dump).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        return str(ray.get(task.remote(place["pid"]), timeout=PATIENCE))
    except Exception as err:
        return f"its stack cannot be read: {type(err).__name__}: {err}".splitlines()[0]


def _dump(pid: int) -> str:
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return "its stack cannot be read: py-spy is not installed there"
    done = subprocess.run(
        [program, "dump", "--pid", str(pid)],
        capture_output=True,
        text=True,
        timeout=PATIENCE / 2,
        check=False,
    )
    return done.stdout.strip() or done.stderr.strip()


def silence(
    seconds: float,
    call: Call | None,
    awaited: Mapping[ActorHandle, Sequence[str]],
    starting: Sequence[ActorHandle],
) -> Event:
    """The event for a long time without any answer.

    Args:
        seconds: Seconds since the last answer.
        call: A call of the exchange; None before the first round.
        awaited: Clients of the current chunk of each actor.
        starting: Actors that have not started yet.
    """
    asked = f"in round {call.sent.round + 1}, exchange {call.tag!r}" if call else "before the first round"
    lines = [f"no answer for {seconds:g} s {asked}"]
    for lane, clients in awaited.items():
        place = f"node {lane.place.get('node', '')[:12]}, pid {lane.place.get('pid')}"
        lines.append(f"waiting for {', '.join(clients)} on {lane.name} ({place})")
    lines += [f"waiting for {lane.name} to start" for lane in starting]
    return Event(
        kind="silence",
        action="",
        round=call.sent.round if call else 0,
        exchange=call.tag if call else "",
        message="; ".join(lines),
        trace="\n".join(f"{lane.name}\n{stack(lane.place)}" for lane in list(awaited)[:MOST_STACKS]),
    )


LOOK_EVERY = 5.0  # seconds between two checks of whether the reservations still have their nodes
IN_FLIGHT = 2  # chunks per actor: one running, one already waiting there
LARGEST_CHUNK = 16
TICK = 0.5  # seconds between two checks of timeouts and of whether to stop
LOST = (
    exceptions.RayActorError,
    exceptions.OutOfMemoryError,
    exceptions.NodeDiedError,
    exceptions.WorkerCrashedError,
)  # errors with which Ray reports a lost actor


def _why_lost(err: Exception) -> str:
    """The reason of a lost actor in one line; of its constructor's traceback, the last one."""
    lines = [line for line in str(err).splitlines() if line.strip()]
    failed = isinstance(err, exceptions.RayActorError) and err.actor_init_failed
    return printable(lines[-1]) if failed else f"{type(err).__name__}: {lines[0]}"


class Exchange:
    """Distributes calls in chunks, the longest calls first and in smaller chunks towards the end."""

    def __init__(self, calls: Sequence[Call], pool: LaneExecutor) -> None:
        self._calls = calls
        self._pool = pool
        self._policy = pool.policy
        self._outbox = Outbox(pool.sent)
        self._answers: dict[int, Update | None] = {}
        self._tries = [0] * len(calls)
        self._running: dict[Any, Job] = {}
        self._free: deque[list[int]] = deque()
        self._heard = time.monotonic()
        self._silent = False
        self._progress = StartProgress()
        for unit in pool.pace.longest_first(calls, units(calls)):
            self._enqueue(unit)

    def run(self) -> list[Update | None]:
        try:
            self._pool.rejoin()
            if not self._pool.lanes:  # the last one was lost in an earlier exchange
                raise ClusterError("no client actor is left")
            while len(self._answers) < len(self._calls):
                self._hand_out()
                self._wait()
        except LostStoreError:
            for lane in self._pool.lanes:
                if lane.busy:  # the results of its calls are not needed any more
                    ray.kill(lane.actor)
                    self._pool.replace(lane)
            raise
        finally:
            for lane in self._pool.lanes:
                lane.own.clear()
                lane.busy = 0
        return [self._answers[i] for i in range(len(self._calls))]

    def starting(self) -> Iterator[int]:
        """Wait until every actor has started; one that dies meanwhile is replaced, as in a round.

        Yields:
            The number of actors that have started, whenever it has grown.

        Raises:
            ClusterError: No actor is left.
        """
        counted = 0
        while any(lane.starting is not None for lane in self._pool.lanes):
            self._wait()
            up = sum(lane.starting is None for lane in self._pool.lanes)
            if up > counted:
                counted = up
                yield up

    def _enqueue(self, unit: list[int]) -> None:
        """Queue calls that are run together; where clients have actors, the first one's actor runs them."""
        lane = self._pool.home.get(self._calls[unit[0]].client)
        (lane.own if lane else self._free).append(unit)

    def _hand_out(self) -> None:
        """Submit a chunk to every lane that has fewer than IN_FLIGHT."""
        for load in range(IN_FLIGHT):
            for lane in self._pool.lanes:
                if lane.starting is None and lane.busy == load and (chunk := self._chunk(lane)):
                    self._submit(lane, chunk)

    def _chunk(self, lane: ActorHandle) -> list[list[int]]:
        queue = lane.own or self._free
        if not queue:
            return []
        shared_by = 1 if queue is lane.own else len(self._pool.lanes)
        # With a time limit, each client is its own chunk, so that its time can be measured.
        largest = 1 if self._policy.client_timeout else max(1, LARGEST_CHUNK // len(queue[0]))
        size = min(largest, max(1, len(queue) // (2 * shared_by)))
        return [queue.popleft() for _ in range(min(size, len(queue)))]

    def _submit(self, lane: ActorHandle, chunk: list[list[int]]) -> None:
        args: list[Any] = []
        places: dict[Any, int] = {}

        def place(ref: Any) -> int:
            if ref not in places:
                places[ref] = len(args)
                args.append(ref)
            return places[ref]

        wire = [[self._message(i, place) for i in unit] for unit in chunk]
        # The name of the task in Ray's dashboard. Ray keeps about ten time series for each name ever used.
        run = lane.actor.run.options(num_returns=1 + sum(map(len, chunk)), name=self._calls[chunk[0][0]].tag)
        returns: list[Any] = run.remote(wire, *args)
        self._running[returns[0]] = Job(lane, chunk, returns[1:], time.monotonic())
        if not lane.busy:
            lane.since = time.monotonic()
        lane.busy += 1

    def _message(self, i: int, place: Callable[[Any], int]) -> WireCall:
        self._tries[i] += 1
        call = self._calls[i]
        return self._outbox.message(call, self._pool.reference(call.client), place)

    def _wait(self) -> None:
        """Handle the next finished chunk or started actor, if there is one, and check the timeouts."""
        starting = {lane.starting: lane for lane in self._pool.lanes if lane.starting is not None}
        done, _ = ray.wait([*self._running, *starting], num_returns=1, timeout=TICK)
        if self._pool.stopped.is_set():
            raise StoppedError("the run was asked to end")
        for ref in done:
            self._heard, self._silent = time.monotonic(), False
            if ref in starting:
                self._arrive(starting[ref])
            else:
                self._receive(ref)
        self._check_timeouts(time.monotonic())

    def _arrive(self, lane: ActorHandle) -> None:
        try:
            lane.place = ray.get(lane.starting)
        except LOST as err:
            lane.failed_starts += 1
            # What its constructor raised, it would raise again.
            hopeless = isinstance(err, exceptions.RayActorError) and err.actor_init_failed
            if hopeless or lane.failed_starts > self._policy.retries:
                self._retire(lane, _why_lost(err))
            else:
                self._pool.replace(lane)
        except exceptions.RayTaskError as err:
            # Before the first round, a node that cannot work ends the run; later, the others go on.
            if not self._calls or isinstance(err.cause, ResourceError) or len(self._pool.lanes) == 1:
                raise
            self._retire(lane, one_line(err.cause))
        else:
            lane.starting = None
            lane.failed_starts = 0
            lane.since = time.monotonic()

    def _receive(self, done: Any) -> None:
        job = self._running.pop(done)
        try:
            answers = ray.get(done)
        except LOST as err:
            self._lose(job, err)
            return
        except exceptions.ObjectLostError as err:
            self._recover(job, err)
            return
        now = time.monotonic()
        seconds = {i: a[2] for i, a in zip(job.indices, answers, strict=True) if isinstance(a, tuple)}
        self._pool.pace.learn(self._calls, job.units, seconds)
        job.lane.busy -= 1
        job.lane.since = now
        waited = max(0.0, now - job.began - sum(seconds.values())) / len(job.indices)
        if any(isinstance(answer, DeviceError) for answer in answers):
            self._end(job.lane)
        given = dict(zip(job.indices, answers, strict=True))
        repeated = {i for unit in job.units if self._are_repeated(unit, given) for i in unit}
        updates = iter(decode_updates([a[0] for a in answers if isinstance(a, tuple)]))
        for i, answer, store in zip(job.indices, answers, job.stores, strict=True):
            if isinstance(answer, tuple):
                _, size, worked = answer
                self._answers[i] = next(updates)
                call = self._calls[i]
                self._pool.keep(call.client, None if size is None else store, size or 0)
                self._pool.on_visit(CallTiming(call.client, call.tag, worked, waited))
            elif i not in repeated:
                self._not_answered(i, answer)

    def _are_repeated(self, unit: list[int], answers: Mapping[int, Any]) -> bool:
        """Whether a unit is run again as a whole: its device failed in it, or before it began."""
        first, *rest = (answers[i] for i in unit)
        if any(answer is not None for answer in rest):
            return False
        if first is None:
            for i in unit:
                self._tries[i] -= 1
            self._enqueue(unit)
            return True
        if rest and isinstance(first, DeviceError):
            self._fail_unit(unit, first.kind, lambda _: first.cause, first.trace)
            return True
        return False

    def _not_answered(self, i: int, err: RayFedError | None) -> None:
        """Handle an error in place of an answer; None: the call was not run, and is queued again."""
        if err is None:
            self._tries[i] -= 1
            self._enqueue([i])
        elif isinstance(err, ClientError):
            self._fail(i, err, err.kind)
        else:
            raise err

    def _fail(self, i: int, err: ClientError, kind: str) -> None:
        if self._is_repeated(i, err, kind, lost=isinstance(err, DeviceError)):
            self._enqueue([i])

    def _fail_unit(self, unit: list[int], kind: str, cause: Callable[[int], str], trace: str) -> None:
        """Repeat calls whose actor was lost: together once more, then one by one.

        Args:
            unit: Positions of the calls.
            kind: Kind of the failure, as of `Event`.
            cause: Says what happened to a call that was tried so many times.
            trace: What is known of it.
        """
        repeated = []
        for i in unit:
            call = self._calls[i]
            err = ClientError(call.client, call.sent.round, call.tag, cause(self._tries[i]), trace)
            if self._is_repeated(i, err, kind, lost=True):
                repeated.append(i)
        if any(self._tries[i] > 1 for i in repeated) or len(repeated) < len(unit):
            for i in repeated:
                self._enqueue([i])
        elif repeated:
            self._enqueue(repeated)

    def _is_repeated(self, i: int, err: ClientError, kind: str, lost: bool = False) -> bool:
        """Apply the policy to a failed call: report it, and return whether it is run again.

        Raises:
            ClientError: The policy is to end the run.
        """
        action = action_for(self._policy, self._tries[i], lost)
        self._pool.on_event(event_of(err, kind, action, self._tries[i]))
        if action == "raise":
            raise err
        if action != "retry":
            self._answers[i] = None
        return action == "retry"

    def _lose(self, job: Job, err: Exception) -> None:
        """Replace the lost actor of a chunk, and repeat its chunks as the policy says."""
        waiting = [ref for ref, other in self._running.items() if other.lane is job.lane]
        jobs = [job, *(self._running.pop(ref) for ref in waiting)]
        self._pool.replace(job.lane)
        kind = "out_of_memory" if isinstance(err, exceptions.OutOfMemoryError) else "actor_lost"
        what = f"{type(err).__name__}: {err}".splitlines()[0]
        for unit in (unit for j in jobs for unit in j.units):
            self._fail_unit(unit, kind, lambda tries: f"its actor was lost {tries} times; {what}", str(err))

    def _recover(self, job: Job, err: exceptions.ObjectLostError) -> None:
        """Handle an object lost with its node: calls are repeated; a lost store raises LostStoreError."""
        job.lane.busy -= 1
        for i in job.indices:
            client = self._calls[i].client
            store = self._pool.reference(client)
            try:
                if store is not None:
                    ray.get(store)
            except exceptions.ObjectLostError as lost:
                raise LostStoreError(client) from lost
        why = f"its answer was lost: {type(err).__name__}"
        for unit in job.units:
            self._fail_unit(unit, "actor_lost", lambda _: why, str(err))

    def _check_timeouts(self, now: float) -> None:
        limit = self._policy.client_timeout
        watchdog = self._policy.watchdog
        self._pool.leave_lost_nodes(now)
        for lane in list(self._pool.lanes):
            if lane.starting is not None and self._is_stuck(lane):
                why = f"its process did not start, and made no progress for {self._patience(lane):g} s"
                self._pool.set_aside(lane)
                self._report_loss(lane, why)
            elif limit and lane.starting is None and lane.busy and now - lane.since > limit:
                self._time_out(lane, limit)
        if watchdog and not self._silent and now - self._heard > watchdog:
            self._silent = True
            self._report_silence(watchdog)

    def _patience(self, lane: ActorHandle) -> float:
        return self._policy.patience_for(lane.options.get("num_gpus", 0))

    def _is_stuck(self, lane: ActorHandle) -> bool:
        """Whether an actor that is starting made no progress for longer than `patience`."""
        up = (other.place["pid"] for other in self._pool.lanes if other.starting is None)
        if self._progress.since(lane.since, up) <= self._patience(lane):
            return False
        return not ray.wait([lane.starting], timeout=0)[0]  # it may have started since

    def _time_out(self, lane: ActorHandle, limit: float) -> None:
        """End the actor of a client that takes too long."""
        late = self._running.pop(next(ref for ref, job in self._running.items() if job.lane is lane))
        self._end(lane)
        for i in late.indices:
            call = self._calls[i]
            cause = f"no answer within client_timeout={limit:g} s"
            self._fail(i, ClientError(call.client, call.sent.round, call.tag, cause), "timeout")

    def _end(self, lane: ActorHandle) -> None:
        """End an actor and start another one in its place; chunks that waited there go to any actor."""
        waiting = [ref for ref, job in self._running.items() if job.lane is lane]
        ray.kill(lane.actor)
        self._pool.replace(lane)
        for unit in (unit for ref in waiting for unit in self._running.pop(ref).units):
            for i in unit:
                self._tries[i] -= 1
            self._enqueue(unit)

    def _retire(self, lane: ActorHandle, why: str) -> None:
        self._pool.retire(lane)
        self._report_loss(lane, why)

    def _report_loss(self, lane: ActorHandle, why: str) -> None:
        self._pool.on_event(Event(kind="lane_lost", action="drop", message=f"{lane.name}: {why}"))
        log.warning("continuing without actor %s: %s", lane.name, why)
        self._free.extend(lane.own)
        lane.own.clear()
        if not self._pool.lanes:
            raise ClusterError(f"no client actor is left; the last one, {lane.name}: {why}")

    def _report_silence(self, watchdog: float) -> None:
        """Report which clients have not answered, where they run, and the stacks of their processes."""
        jobs = {job.lane: job for job in reversed(self._running.values())}
        awaited = {lane: [self._calls[i].client for i in job.indices] for lane, job in jobs.items()}
        starting = [lane for lane in self._pool.lanes if lane.starting is not None]
        event = silence(watchdog, self._calls[0] if self._calls else None, awaited, starting)
        log.warning("%s\n%s", event.message, event.trace)
        self._pool.on_event(event)


SMALL = 100_000
"""Bytes below which Ray sends a result to the driver instead of keeping it in the object store."""

BUDGET = 64_000_000
"""Bytes of stores in the memory of the driver."""


class Stores:
    """The present store of every client, as a reference to an object of Ray."""

    def __init__(self, put_again: Callable[[Any], Any]) -> None:
        """Args: put_again: puts the value of a reference into the object store; returns the new reference."""
        self._put_again = put_again
        self._kept: dict[str, Kept] = {}
        self._small: dict[str, int] = {}  # bytes by client, of those in the driver; first the oldest ones
        self._bytes = 0
        self._serial = itertools.count()

    def all(self) -> dict[str, Kept]:
        """The stores of all clients that keep something."""
        return dict(self._kept)

    def reference(self, client: str) -> Any:
        """Object reference of the store of a client; None if it keeps nothing."""
        kept = self._kept.get(client)
        return kept.value if kept else None

    def keep(self, client: str, reference: Any, size: int = SMALL) -> None:
        """Remember the new store of a client.

        Args:
            reference: Its object reference; None: the client keeps nothing.
            size: Bytes of its tensors, where a call returned it.
        """
        self._bytes -= self._small.pop(client, 0)
        if reference is None:
            self._kept.pop(client, None)
            return
        self._kept[client] = Kept(next(self._serial), reference)
        if size < SMALL:
            self._small[client] = size
            self._bytes += size
            self._make_room()

    def _make_room(self) -> None:
        while self._bytes > BUDGET:
            oldest = next(iter(self._small))
            self._bytes -= self._small.pop(oldest)
            kept = self._kept[oldest]
            self._kept[oldest] = Kept(kept.serial, self._put_again(kept.value))

    def clear(self) -> None:
        """Forget all stores."""
        self._kept.clear()
        self._small.clear()
        self._bytes = 0


log = logging.getLogger(__name__)


class LaneExecutor:
    """Runs calls on client actors (lanes) and keeps the stores of clients; subclasses start the actors.

    Any lane may run any client: a store is sent with the call and kept in the object store between rounds. An
    actor that dies is replaced and its calls are run again, with the same result, because a call depends on
    its inputs only.
    """

    def __init__(self, lanes: list[ActorHandle], policy: Policy) -> None:
        """Make an executor without stores.

        Args:
            lanes: Lanes that run the calls. A client with the name of a lane (after the last colon) always
                runs there.
            policy: What is done when a client or an actor fails.
        """
        self.policy = policy
        self.on_event: Callable[[Event], None] = lambda _: None
        self.on_visit: Callable[[CallTiming], None] = lambda _: None
        self.stopped = threading.Event()
        self.replaced = 0
        self.pace = Pace()
        self.sent = SentTensors()
        self._stores = Stores(lambda reference: ray.put(ray.get(reference)))
        self.use_lanes(lanes)

    def use_lanes(self, lanes: list[ActorHandle]) -> None:
        """Run the next calls on these lanes."""
        self.lanes = lanes
        self.home = {lane.name.rsplit(":", 1)[-1]: lane for lane in lanes}

    def _start(self, lane: ActorHandle) -> None:
        """Start the actor of a lane."""
        raise NotImplementedError

    @property
    def actors(self) -> int:
        return len(self.lanes)

    def map(self, calls: Sequence[Call]) -> list[Update | None]:
        """Run calls of clients; returns their answers in the order of the calls.

        Raises:
            ClientError: A client failed, or its actors died too often.
            ClusterError: No actor is left.
            LostStoreError: A client's store was on a node that is gone.
            StoppedError: `stop` was called.
        """
        return Exchange(calls, self).run()

    def replace(self, lane: ActorHandle) -> None:
        """Replace a dead actor by a new one."""
        log.warning("actor %s was lost; a new actor repeats its work", lane.name)
        self.replaced += 1
        self._start(lane)

    def retire(self, lane: ActorHandle) -> None:
        """Continue without a lane whose actor cannot be started."""
        ray.kill(lane.actor)
        self._leave_out(lane)

    def _leave_out(self, lane: ActorHandle) -> None:
        self.lanes.remove(lane)
        self.home = {client: other for client, other in self.home.items() if other is not lane}

    def set_aside(self, lane: ActorHandle) -> None:
        """Continue without a lane whose actor has not started in time."""
        self.retire(lane)

    def rejoin(self) -> None:
        """Use the lanes again that were set aside and have started since."""

    def leave_lost_nodes(self, now: float) -> None:
        """Start the actors elsewhere that have no call and whose node is gone, if this executor may."""

    def stores(self) -> dict[str, Kept]:
        return self._stores.all()

    def reference(self, client: str) -> Any:
        """Object reference of the store of a client; None if it keeps nothing."""
        return self._stores.reference(client)

    def keep(self, client: str, reference: Any, size: int) -> None:
        """Remember the object reference of a client's new store, and its bytes; None: it keeps nothing."""
        self._stores.keep(client, reference, size)

    def fetch(self, client: str, kept: Kept) -> dict[str, Any]:
        try:
            return dict(decode(ray.get(kept.value)))
        except ObjectLostError as err:
            raise LostStoreError(client) from err

    def restore(self, client: str, store: Mapping[str, Any]) -> None:
        self._stores.keep(client, ray.put(encode(store)) if store else None)

    def forget(self) -> None:
        self._stores.clear()
        self.sent = SentTensors()

    def stop(self) -> None:
        self.stopped.set()


def start_client(lane: ActorHandle, context: Any, weights: Any, labels: Mapping[str, str] | None) -> Any:
    """Start the client actor of a lane; it ends with the process that calls this, or when that kills it.

    Args:
        lane: Its name and its options.
        context: Object reference of the `ClientContext`.
        weights: Object reference of the initial tensors.
        labels: Labels of its metrics; None: it has none.

    Returns:
        Its handle; it has no model yet.
    """
    return ray.remote(ClientActor).options(**lane.ray_options).remote(lane.name, context, weights, labels)


class RayExecutor(LaneExecutor):
    """Runs calls on actors that it starts and ends itself.

    Attributes:
        absent: Lanes whose actors did not start in time. They are used as soon as they start, such as after
            their node has returned.
    """

    def __init__(
        self,
        context: Any,
        weights: Any,
        names: Sequence[str],
        options: Sequence[dict[str, Any]],
        policy: Policy | None = None,
        labels: Mapping[str, str] | None = None,
        before: RayExecutor | None = None,
        started: Sequence[Any] = (),
    ) -> None:
        """Start the actors, or take over those of another executor or those that were started for this one.

        Args:
            context: Object reference of the `ClientContext` of the actors.
            weights: Object reference of the initial tensors.
            names: One per actor; a client of the same name (after the last colon) always runs there.
            options: Ray options of each actor: num_cpus, num_gpus, scheduling_strategy.
            policy: What is done when a client or an actor fails; None: the defaults.
            labels: Labels of the actors' metrics: run, algorithm, trial; None: they have no metrics.
            before: The executor of a finished experiment, which had the same names and options. Its actors
                change to this experiment, and it must not be used any more.
            started: Actors that `start_client` has started, in the order of the names; empty: none was.
        """
        self.absent: list[ActorHandle] = []
        self._looked = time.monotonic()
        self._world = context
        self._weights = weights
        self._labels = labels
        fresh = [ActorHandle(name, own) for name, own in zip(names, options, strict=True)]
        super().__init__(before.lanes if before else fresh, policy or Policy())
        for lane, actor in itertools.zip_longest(self.lanes, started):
            if before:
                lane.change(lane.actor.change.remote(self._world, self._weights, self._labels))
            elif actor is not None:
                lane.begin(actor)
            else:
                self._start(lane)
        for lane in before.absent if before else ():
            ray.kill(lane.actor)
            self._start(lane)
            self.absent.append(lane)

    def _start(self, lane: ActorHandle) -> None:
        if lane.started:
            lane.options = reserve_again(lane.options)
        lane.begin(start_client(lane, self._world, self._weights, self._labels))

    def set_aside(self, lane: ActorHandle) -> None:
        self._leave_out(lane)
        self.absent.append(lane)

    def rejoin(self) -> None:
        for lane in list(self.absent):
            if not ray.wait([lane.starting], timeout=0)[0]:
                continue
            try:
                lane.place = ray.get(lane.starting)
            except LOST:
                lane.failed_starts += 1
                if lane.failed_starts > self.policy.retries:
                    self.absent.remove(lane)
                else:
                    self.replace(lane)
                continue
            lane.starting, lane.failed_starts, lane.since = None, 0, time.monotonic()
            log.warning("actor %s has started; it is used again", lane.name)
            self.absent.remove(lane)
            self.use_lanes([*self.lanes, lane])

    def leave_lost_nodes(self, now: float) -> None:
        if now - self._looked < LOOK_EVERY:
            return
        self._looked = now
        for lane in [*self.lanes, *self.absent]:
            if not lane.busy and has_lost_its_node(lane.options):
                self.replace(lane)

    def starting(self) -> Iterator[int]:
        """Wait until every actor has its model; yields the number of those that have, whenever it has grown.

        Raises:
            ClusterError: No actor could be started.
        """
        return Exchange([], self).starting()

    def wait_until_up(self) -> None:
        """Wait until every actor has its model, as `starting` does."""
        for _ in self.starting():
            pass

    def close(self) -> None:
        for lane in (*self.lanes, *self.absent):
            ray.kill(lane.actor)
