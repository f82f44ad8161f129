"""The policy for failures of clients and actors, and the events that record them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from annotated_types import Ge

from rayfed.errors import ClientError
from rayfed.federation.executor import Event
from rayfed.types import Positive

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
