"""One finished round, as the loop hands it to whoever records it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rayfed.evaluation.metrics import Evaluation
from rayfed.federation.cohort import Ledger
from rayfed.types import ServerState


@dataclass(frozen=True, kw_only=True)
class Round:
    """One finished round.

    Attributes:
        state: What the server carries on.
        row: Its line in result.json.
        ledger: Traffic, client scores and the method's tables.
        scores: Evaluation by model (`global`, `personal`), where one was made.
    """

    state: ServerState
    row: dict[str, Any]
    ledger: Ledger
    scores: dict[str, Evaluation] = field(default_factory=dict)
