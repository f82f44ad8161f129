"""Runs the calls of clients on a pool of Ray actors, each with a share of a CPU and of a GPU."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import ObjectLostError

from rayfed.errors import LostStoreError, RayFedError, ResourceError
from rayfed.executors.exchange import Exchange
from rayfed.executors.failed_call import out_of_memory
from rayfed.executors.failures import Policy
from rayfed.executors.lane import Lane, Slot, WireCall
from rayfed.executors.metrics import Memory
from rayfed.executors.pace import Pace
from rayfed.executors.stores import Stores
from rayfed.executors.trim import Trim, keep_freed_memory, leave_out_of_garbage_collection
from rayfed.executors.wire import Packed, decode, encode, encode_update, unpack
from rayfed.executors.worker import Weights, Worker, World
from rayfed.federation.executor import Call, Event, Kept, Visit
from rayfed.types import Broadcast, Params, Update, num_bytes

log = logging.getLogger(__name__)


class ClientActor:
    """A Ray actor that holds one model and runs any client with it, one call after the other."""

    def __init__(
        self, name: str, world: World, weights: Weights, labels: Mapping[str, str] | None = None
    ) -> None:
        """Args: name: name of the actor. labels: labels of its metrics; None: no metrics."""
        self._name = name
        gpus = ray.get_gpu_ids()
        usable = bool(gpus) and torch.cuda.is_available()
        if gpus and not usable:
            log.warning(
                "actor %s was given GPU %s but torch sees none, so it runs on the CPU; install a torch with "
                "CUDA, or set cluster.num_gpus=0",
                *(name, gpus),
            )
        self._device = "cuda:0" if usable else "cpu"
        keep_freed_memory()
        self._trim = Trim()
        self._share = ray.get_runtime_context().get_assigned_resources().get("GPU", 1.0) if usable else 1.0
        self._hold(world, weights, labels)

    def _hold(self, world: World, weights: Weights, labels: Mapping[str, str] | None) -> None:
        self._failed: ResourceError | None = None
        try:
            self._worker = Worker(world, weights, self._device, self._share)
        except torch.OutOfMemoryError as err:  # `where` raises it: Ray hides what a constructor raises
            self._failed = ResourceError(f"cluster.gpus_per_actor: {out_of_memory(err, self._share, [])}")
        self._memory = Memory(labels, self._device) if labels else None
        leave_out_of_garbage_collection()

    def change(
        self, world: World, weights: Weights, labels: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Run the clients of another experiment from now on; returns `where()`."""
        del self._worker  # two models may not fit, and no call may run with the former one
        self._hold(world, weights, labels)
        return self.where()

    def __repr__(self) -> str:
        return self._name

    def run(self, units: list[list[WireCall]], *args: Any) -> tuple[Any, ...]:
        """Run calls of clients, one unit after the other; the clients of a unit share their passes.

        Returns:
            The list of answers: for each call an update, the bytes of the client's store (None: it keeps
            none), and the seconds it took, or its error. Then the store of each client as a value of its own,
            so that large stores stay in the object store and are not sent to the driver.
        """
        answers: list[tuple[tuple[Update, Packed], int | None, float] | RayFedError] = []
        stores: list[Any] = []
        received = Received(args)
        for unit in units:
            for answer, store in self._unit(unit, received):
                answers.append(answer)
                stores.append(store)
        self._trim.now_and_then()
        if self._memory is not None:
            self._memory.measure()
        return answers, *stores

    def _unit(self, unit: list[WireCall], received: Received) -> Iterator[tuple[Any, Any]]:
        """The answer and the store of each call of a unit; if one fails, all are run alone."""
        calls = [received.call(wire) for wire in unit]
        began = time.perf_counter()
        done = None
        if len(unit) > 1:
            done = self._worker.call_group(calls, [received.store(wire) for wire in unit])
        if done is not None:
            seconds = (time.perf_counter() - began) / len(unit)
            yield from ((self._encoded(update, store, seconds)) for update, store in done)
            return
        for wire, call in zip(unit, calls, strict=True):
            began = time.perf_counter()
            try:
                update, store = self._worker.call(call, received.store(wire))
            except RayFedError as err:
                yield err, None
            else:
                yield self._encoded(update, store, time.perf_counter() - began)

    @staticmethod
    def _encoded(update: Update, store: Mapping[str, Any], seconds: float) -> tuple[Any, Any]:
        return (encode_update(update), num_bytes(store) if store else None, seconds), encode(store)

    def where(self) -> dict[str, Any]:
        """Name, node, worker and process id of this actor.

        Raises:
            ResourceError: The device has no memory for its model.
        """
        if self._failed is not None:
            raise self._failed
        context = ray.get_runtime_context()
        return {
            "name": self._name,
            "node": context.get_node_id(),
            "worker": context.get_worker_id(),
            "pid": os.getpid(),
        }


class Received:
    """The arguments of a remote call, each of them decoded once."""

    def __init__(self, args: Sequence[Any]) -> None:
        self._args = args
        self._params: dict[int, Params] = {}

    def call(self, wire: WireCall) -> Call:
        """The call that was sent."""
        slot = wire.params.index
        if slot not in self._params:
            self._params[slot] = unpack(self._args[slot])
        shared = {k: self._args[v.index] if isinstance(v, Slot) else v for k, v in wire.shared.items()}
        held: dict[str, Any] = {"blocks": wire.blocks, "rank": wire.rank}
        sent = Broadcast(round=wire.round, params=self._params[slot], shared=decode(shared), **held)
        return Call(wire.client, wire.task, wire.tag, sent)

    def store(self, wire: WireCall) -> dict[str, Any]:
        """A new copy of the client's store."""
        return dict(decode(self._args[wire.store.index], copy=True)) if wire.store else {}


class LaneExecutor:
    """Runs calls on client actors (lanes) and keeps the stores of clients; subclasses start the actors.

    Any lane may run any client: a store is sent with the call and kept in the object store between rounds. An
    actor that dies is replaced and its calls are run again, with the same result, because a call depends on
    its inputs only.
    """

    def __init__(self, lanes: list[Lane], policy: Policy) -> None:
        """Make an executor without stores.

        Args:
            lanes: Lanes that run the calls. A client with the name of a lane (after the last colon) always
                runs there.
            policy: What is done when a client or an actor fails.
        """
        self.policy = policy
        self.on_event: Callable[[Event], None] = lambda _: None
        self.on_visit: Callable[[Visit], None] = lambda _: None
        self.stopped = threading.Event()
        self.replaced = 0
        self.pace = Pace()
        self._stores = Stores(lambda reference: ray.put(ray.get(reference)))
        self.use_lanes(lanes)

    def use_lanes(self, lanes: list[Lane]) -> None:
        """Run the next calls on these lanes."""
        self.lanes = lanes
        self.home = {lane.name.rsplit(":", 1)[-1]: lane for lane in lanes}

    def _start(self, lane: Lane) -> None:
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

    def replace(self, lane: Lane) -> None:
        """Replace a dead actor by a new one."""
        log.warning("actor %s was lost; a new actor repeats its work", lane.name)
        self.replaced += 1
        self._start(lane)

    def retire(self, lane: Lane) -> None:
        """Continue without a lane whose actor cannot be started."""
        ray.kill(lane.actor)
        self.lanes.remove(lane)
        self.home = {client: other for client, other in self.home.items() if other is not lane}

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

    def stop(self) -> None:
        self.stopped.set()


class RayExecutor(LaneExecutor):
    """Runs calls on actors that it starts and ends itself."""

    def __init__(
        self,
        world: World,
        weights: Any,
        names: Sequence[str],
        options: Sequence[dict[str, Any]],
        policy: Policy | None = None,
        labels: Mapping[str, str] | None = None,
        before: RayExecutor | None = None,
    ) -> None:
        """Start the actors, or take over those of another executor.

        Args:
            world: What the actors need to run calls of clients.
            weights: Object reference of the initial tensors.
            names: One per actor; a client of the same name (after the last colon) always runs there.
            options: Ray options of each actor: num_cpus, num_gpus, scheduling_strategy.
            policy: What is done when a client or an actor fails; None: the defaults.
            labels: Labels of the actors' metrics: run, algorithm, trial; None: they have no metrics.
            before: The executor of a finished experiment, which had the same names and options. Its actors
                change to this experiment, and it must not be used any more.
        """
        self._world = ray.put(world)
        self._weights = weights
        self._labels = labels
        fresh = [Lane(name, own) for name, own in zip(names, options, strict=True)]
        super().__init__(before.lanes if before else fresh, policy or Policy())
        for lane in self.lanes:
            if before:
                lane.change(lane.actor.change.remote(self._world, self._weights, self._labels))
            else:
                self._start(lane)

    def _start(self, lane: Lane) -> None:
        actor = ray.remote(ClientActor).options(**lane.ray_options)
        lane.begin(actor.remote(lane.name, self._world, self._weights, self._labels))

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
        for lane in self.lanes:
            ray.kill(lane.actor)
