"""Columns of the row of a round: scores, faults and cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayfed.evaluation.metrics import Evaluation, summary
from rayfed.federation.cohort import Ledger
from rayfed.federation.cost import Cost
from rayfed.heterogeneity.faults import Faults
from rayfed.types import ServerState


def headline(scores: Mapping[str, Evaluation], deploys: str) -> dict[str, float | str]:
    """Accuracy columns of a round: those of the model that the method deploys have no prefix.

    Those of other models begin with its name, except that the global model is the one that is scored on
    held-out domains and by unseen clients, whatever a method deploys.

    Args:
        scores: Evaluations by model: `global`, `personal`, or `adapted` (`rayfed.engine.adapted`).
        deploys: Which of the first two the method deploys.
    """
    row: dict[str, float | str] = {}
    for model, scored in scores.items():
        columns = summary(scored)
        prefix = "" if model == deploys else f"{model}_"
        bare = ("held_out_", "unseen_") if model == "global" else ()
        row |= {name if name.startswith(bare) else prefix + name: v for name, v in columns.items()}
    return row


def fault_columns(faults: Faults | None, ledger: Ledger, state: ServerState) -> dict[str, Any]:
    """Columns of a round about faults: missing clients, and the virtual clock where there is one.

    The number of missing clients is left out where no faults are injected and all clients answered.
    """
    row: dict[str, Any] = {}
    if faults is not None or ledger.missing:
        row["missing"] = len(ledger.missing)
    if faults is not None and faults.has_clock:
        row |= {"virtual_seconds": ledger.seconds, "virtual_time": state.virtual_time}
    return row


def cost_columns(cost: Cost | None, ledger: Ledger) -> dict[str, int]:
    """Columns of a round about what training cost: steps and operations of all clients, what one trains."""
    steps = {"local_steps": ledger.steps, "local_examples": ledger.rows}
    return steps if cost is None else {**steps, "flops": ledger.flops, "trained_params": ledger.trained}
