"""What an executor does: it runs calls of clients anywhere, and keeps the private stores of clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from rayfed.federation.client import Client
from rayfed.types import Broadcast, Update

Task: TypeAlias = Callable[[Client, Broadcast], Update]


@dataclass(frozen=True)
class Call:
    """One task for one client.

    Attributes:
        client: Who is called.
        task: What it does; importable by name, or a `functools.partial` of such a function.
        tag: Names the random stream of the call, together with round and client.
        sent: What the server sends.
        cost: Relative work, to place the longest calls first; never changes a result.
        seconds: How long it takes on the virtual clock, transfers included.
    """

    client: str
    task: Task
    tag: str
    sent: Broadcast
    cost: float = 1.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Kept:
    """A client's private store between two calls.

    Attributes:
        serial: Another number for every store that was ever kept.
        value: The store, or where it is.
    """

    serial: int
    value: Any


@dataclass(frozen=True)
class Visit:
    """How long an answered call took; for whoever watches, never part of a result.

    Attributes:
        client: Who was called.
        exchange: Tag of the exchange.
        seconds: Of work.
        waited: Seconds in the queue of an actor and on the wire.
    """

    client: str
    exchange: str
    seconds: float
    waited: float = 0.0


class Executor(Protocol):
    """Runs calls anywhere, in any order, and keeps what clients keep.

    Attributes:
        on_event: Told about every failure.
        on_visit: Told about every call that was answered.
        actors: Client actors that play the calls; 0: this process does.
    """

    on_event: Callable[[Event], None]
    on_visit: Callable[[Visit], None]

    @property
    def actors(self) -> int: ...

    def map(self, calls: Sequence[Call]) -> Sequence[Update | None]:
        """Answer in the order given, None for a client that was dropped.

        Tensors of an answer may be read-only views.
        """

    def stores(self) -> dict[str, Kept]:
        """What every client keeps now, by client."""

    def fetch(self, client: str, kept: Kept) -> dict[str, Any]:
        """The content of a client's store.

        Raises:
            LostStoreError: It was on a node that is gone.
        """

    def restore(self, client: str, store: Mapping[str, Any]) -> None:
        """Give a client its store back."""

    def forget(self) -> None:
        """Drop all stores."""

    def stop(self) -> None:
        """Raise Stopped in the exchange under way, and in every later one."""

    def close(self) -> None:
        """End what this executor started."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something went wrong; one row of events.parquet.

    Attributes:
        kind: error (raised by client code), timeout, actor_lost, out_of_memory, lane_lost (an actor was not
            replaced), store_lost, silence (the watchdog spoke), tracker_lost (its server does not answer),
            nonfinite (a loss or a tensor is NaN or infinite).
        action: retry, drop, raise, restart (of the round), or nothing.
        round: Round index, from 0.
        exchange: Tag of the exchange.
        client: Who was being called.
        attempt: How many times it had been called.
        message: One line.
        trace: Traceback, where there is one.
    """

    kind: str
    action: str
    round: int = -1
    exchange: str = ""
    client: str = ""
    attempt: int = 0
    message: str = ""
    trace: str = ""
