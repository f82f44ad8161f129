"""Runs the calls of clients on a pool of Ray actors, each with a share of a CPU and of a GPU.

The private stores of clients rest in the object store and beyond its budget on disk.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ObjectLostError

from rayfed.errors import LostStoreError
from rayfed.executors.client_actor import ClientActor
from rayfed.executors.exchange import Exchange
from rayfed.executors.failures import Policy
from rayfed.executors.lane import Lane, Pace
from rayfed.executors.wire import decode, encode
from rayfed.executors.worker import World
from rayfed.federation.executor import Call, Event, Kept, Visit
from rayfed.types import Update

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
            client: Id of the client.
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
