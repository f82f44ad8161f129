"""What is done when a client or a machine fails, and how it is recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from rayfed.errors import ClientError
from rayfed.federation.executor import Event

OnError: TypeAlias = Literal["raise", "retry", "drop"]
OnNonFinite: TypeAlias = Literal["warn", "raise"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What is done about failures.

    Attributes:
        on_client_error: A client that raises, answers nonsense or is too slow ends the run, is asked again,
            or is left out of the round.
        retries: How often a client is asked again: after its actor was lost (always), or after its own
            failure (`retry`).
        client_timeout: Seconds a client may take; none: as long as it likes.
        watchdog: Seconds without any answer after which it is said who is being waited for; none: never.
        patience: Seconds a new actor may take to come up; after that the others do its work.
    """

    on_client_error: OnError = "raise"
    retries: int = 2
    client_timeout: float | None = None
    watchdog: float | None = None
    patience: float = 120.0


def action_for(policy: Policy, attempt: int, lost: bool = False) -> str:
    """What to do after a failure: retry, drop or raise.

    Args:
        policy: What the user wants.
        attempt: How many times the client was called.
        lost: The actor was lost, which is nobody's fault: always tried again first.
    """
    if (lost or policy.on_client_error == "retry") and attempt <= policy.retries:
        return "retry"
    return "drop" if policy.on_client_error == "drop" else "raise"


def event_of(err: ClientError, kind: str, action: str, attempt: int) -> Event:
    """The record of a failed call."""
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
