"""The contract of executors, which run client calls and keep private stores, and the policy for failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, TypeAlias

from annotated_types import Ge

from rayfed.errors import ClientError
from rayfed.federation.client import Client
from rayfed.types import Broadcast, Params, Positive, Update

ClientTask: TypeAlias = Callable[[Client, Broadcast], Update]
"""Work that a client does in an exchange: from the client and the message it received to its answer."""

Content: TypeAlias = tuple[Params, Mapping[str, Any]]
"""Values of an answer and what a method adds to them: `params` and `extra` of an `Update`."""

Leave: TypeAlias = Callable[[Client, Broadcast, Params, Mapping[str, Any]], Content]
"""Changes the answer of a client to a message as it leaves the client, such as an attack or compression."""


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
        leaves: Run one after the other on the answer as it leaves the client, after what stays was kept.
    """

    client: str
    task: ClientTask
    tag: str
    sent: Broadcast
    examples: float = 1.0
    share: float = 1.0
    seconds: float = 0.0
    group: int = 1
    leaves: tuple[Leave, ...] = ()

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
class CallTiming:
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
    on_visit: Callable[[CallTiming], None]

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


OnError: TypeAlias = Literal["raise", "retry", "drop"]
OnNonFinite: TypeAlias = Literal["warn", "raise"]


PATIENCE = 120.0
GPU_PATIENCE = 600.0


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The policy for failures: the section `failures` of a config.

    Attributes:
        on_client_error: What happens if a client raises an error, gives an invalid answer or takes too long:
            the run ends (raise); its call is repeated up to `retries` times, then the run ends (retry); or it
            is left out of the round (drop).
        retries: Number of repetitions of a call: after its actor was lost (always), or after an error of the
            client (with `retry`).
        client_timeout: Largest number of seconds of a client's call; none: no limit. On Ray only.
        watchdog: Seconds without any answer after which the clients that have not answered are listed, with
            the stacks of their processes; none: never.
        patience: Seconds without progress of a starting actor after which the run continues without it; auto:
            120, or 600 for an actor with a GPU, whose imports are large and may come over a network. On Ray
            only.
    """

    on_client_error: OnError = "raise"
    retries: Annotated[int, Ge(0)] = 2
    client_timeout: Positive | None = None
    watchdog: Positive | None = 300.0
    patience: Literal["auto"] | Positive = "auto"

    def patience_for(self, gpus: float) -> float:
        """Seconds of `patience` for an actor with this share of GPUs."""
        if self.patience == "auto":
            return GPU_PATIENCE if gpus else PATIENCE
        return self.patience


def action_for(policy: Policy, attempt: int, lost: bool = False) -> str:
    """The action after a failure: retry, drop or raise.

    Args:
        policy: The policy of the config.
        attempt: Number of attempts so far.
        lost: The actor was lost, not the client's code at fault; the call is then always repeated first.
    """
    if (lost or policy.on_client_error == "retry") and attempt <= policy.retries:
        return "retry"
    return "drop" if policy.on_client_error == "drop" else "raise"


def event_of(err: ClientError, kind: str, action: str, attempt: int) -> Event:
    """The event of a failed call."""
    return Event(
        kind=kind,
        action=action,
        round=err.round,
        exchange=err.task,
        client=err.client,
        attempt=attempt,
        message=err.cause,
        trace=err.trace,
    )
