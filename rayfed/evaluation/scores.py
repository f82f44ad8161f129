"""The result of one round, which the round loop yields and the run folder records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rayfed.evaluation.metrics import Evaluation
from rayfed.federation.cohort import Ledger
from rayfed.types import ServerState


@dataclass(frozen=True, kw_only=True)
class Round:
    """The result of one round.

    Attributes:
        state: State of the server after the round.
        row: Its row in rounds.jsonl.
        ledger: Its traffic, metrics of clients and tables of the method.
        scores: Evaluations by model (`global`, `personal`); only of models that were scored.
    """

    state: ServerState
    row: dict[str, Any]
    ledger: Ledger
    scores: dict[str, Evaluation] = field(default_factory=dict)
