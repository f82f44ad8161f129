"""The interface of executors, which run client calls and keep the private stores of clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from rayfed.federation.client import Client
from rayfed.types import Broadcast, Update

Task: TypeAlias = Callable[[Client, Broadcast], Update]
"""Work that a client does in an exchange: from the client and the message it received to its answer."""


@dataclass(frozen=True)
class Call:
    """One task for one client.

    Attributes:
        client: Id of the client to call.
        task: A function that can be imported by name, or a `functools.partial` of one.
        tag: Name of the exchange; with round and client it seeds the random stream of the call.
        sent: The message from the server.
        examples: Training examples of the client, for estimates of its work.
        share: Share of the blocks of the backbone that it holds, for the same.
        seconds: Duration on the virtual clock in seconds, transfers included.
        group: Largest number of calls of the exchange that share their passes (`units`).
    """

    client: str
    task: Task
    tag: str
    sent: Broadcast
    examples: float = 1.0
    share: float = 1.0
    seconds: float = 0.0
    group: int = 1

    @property
    def cost(self) -> float:
        """Estimated work in arbitrary units, by which calls that share their passes are chosen."""
        return self.examples * self.share


def units(calls: Sequence[Call]) -> list[list[int]]:
    """Positions of the calls that are run together, the longest calls first.

    The members of a unit share their passes, so rounding depends on who they are. They follow from the calls
    of the exchange alone, and not from who runs them.
    """
    order = sorted(range(len(calls)), key=lambda i: -calls[i].cost)
    size = min((call.group for call in calls), default=1)
    return [order[i : i + size] for i in range(0, len(order), size)]


@dataclass(frozen=True)
class Kept:
    """A client's private store between two calls.

    Attributes:
        serial: Version number; it changes whenever a store is saved.
        value: The store itself, or a reference to where it is kept.
    """

    serial: int
    value: Any


@dataclass(frozen=True)
class Visit:
    """Wall-clock timing of an answered call, for monitoring; it is never part of a result.

    Attributes:
        client: Id of the client that was called.
        exchange: Tag of the exchange.
        seconds: Seconds the task ran.
        waited: Seconds spent in the queue of an actor and in transfers.
    """

    client: str
    exchange: str
    seconds: float
    waited: float = 0.0


class Executor(Protocol):
    """Runs calls in any process and order, and keeps the stores of clients between calls.

    Attributes:
        on_event: Called with every failure.
        on_visit: Called with the timing of every answered call.
        actors: Number of actors that run calls; 0: they run in the calling process.
    """

    on_event: Callable[[Event], None]
    on_visit: Callable[[Visit], None]

    @property
    def actors(self) -> int: ...

    def map(self, calls: Sequence[Call]) -> Sequence[Update | None]:
        """Run the calls and return their answers in the order of `calls`.

        An answer is None where the client was dropped. Tensors of an answer may be read-only views.
        """

    def stores(self) -> dict[str, Kept]:
        """The present stores of all clients, by client id."""

    def fetch(self, client: str, kept: Kept) -> dict[str, Any]:
        """The content of a client's store.

        Raises:
            LostStoreError: The node that held the store has failed.
        """

    def restore(self, client: str, store: Mapping[str, Any]) -> None:
        """Set the store of a client, as read from a checkpoint."""

    def forget(self) -> None:
        """Delete all stores."""

    def stop(self) -> None:
        """End the current exchange, and every later one, with StoppedError."""

    def close(self) -> None:
        """End all processes that this executor started."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A failure during a run; one row of events.parquet.

    Attributes:
        kind: error (client code raised an exception), timeout, device_memory, device_failed (the process of
            the client cannot use its device any more), actor_lost, out_of_memory, lane_lost (an actor was
            lost and not replaced), store_lost, silence (the watchdog saw no progress), tracker_lost (the
            tracking server does not answer), nonfinite (a loss or a tensor is NaN or infinite).
        action: What was done: retry, drop, raise, restart (the round is run again), or empty.
        round: Round index, from 0; -1: outside the rounds.
        exchange: Tag of the exchange.
        client: Id of the client that was called.
        attempt: Number of calls of this client in this exchange so far.
        message: Description in one line.
        trace: Traceback; empty where there is none.
    """

    kind: str
    action: str
    round: int = -1
    exchange: str = ""
    client: str = ""
    attempt: int = 0
    message: str = ""
    trace: str = ""
