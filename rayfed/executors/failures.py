"""What is done when a client or a machine fails, and how it is recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from annotated_types import Ge

from rayfed.errors import ClientError
from rayfed.federation.executor import Event
from rayfed.types import Positive

OnError: TypeAlias = Literal["raise", "retry", "drop"]
OnNonFinite: TypeAlias = Literal["warn", "raise"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What is done about failures: the section `failures` of a config.

    Attributes:
        on_client_error: A client that raises, answers nonsense or is too slow ends the run (raise), is asked
            again up to `retries` times and then ends it (retry), or is left out of the round (drop).
        retries: How often a client is asked again: after its actor was lost (always), or after its own
            failure (`retry`).
        client_timeout: Seconds a client may take; none: no limit. On Ray only.
        watchdog: Seconds without any answer after which the clients that have not answered are listed, with
            what they are doing; none: never.
        patience: Seconds a new actor may take to start; after that the others do its work. On Ray only.
    """

    on_client_error: OnError = "raise"
    retries: Annotated[int, Ge(0)] = 2
    client_timeout: Positive | None = None
    watchdog: Positive | None = 300.0
    patience: Positive = 120.0


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
