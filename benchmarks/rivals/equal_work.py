"""Whether two programs did the same work: counts of steps and examples, final values, final loss."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.rivals.measuring import Round
from benchmarks.rivals.workloads import Examples, Work, loss_of, network, put, read

FAR = 0.02
"""The largest distance of final values, as a share of how far training moved them (`distance`)."""
LOSS = 0.01
"""The largest relative difference of final losses."""
SCORED = 8
"""Clients whose first batch of examples gives the final loss."""


def digest(values: Mapping[str, Any]) -> str:
    """SHA-256 of all values and their names."""
    made = hashlib.sha256()
    for name in sorted(values):
        made.update(name.encode())
        made.update(np.ascontiguousarray(values[name]).tobytes())
    return made.hexdigest()


def distance(values: Mapping[str, Any], others: Mapping[str, Any], start: Mapping[str, Any]) -> float:
    """Euclidean distance of two sets of values, divided by that of the second from where it began.

    Raises:
        ValueError: Names or shapes differ.
    """
    shapes = {name: np.shape(value) for name, value in others.items()}
    if {name: np.shape(value) for name, value in values.items()} != shapes:
        odd = sorted(values.keys() ^ others.keys()) or "shapes"
        raise ValueError(f"trained values differ: {odd}")

    def squares(left: Mapping[str, Any], right: Mapping[str, Any]) -> float:
        return float(sum(np.square(np.float64(left[n]) - np.float64(right[n])).sum() for n in shapes))

    return float(np.sqrt(squares(values, others) / squares(others, start)))


@torch.no_grad()
def final_loss(folder: Path, values: Mapping[str, Any]) -> float:
    """Mean loss of the first examples of some clients, computed by plain PyTorch for every side."""
    net, work, examples = network(folder).eval(), read(folder), Examples(folder)
    put(net, values)
    rows = np.arange(min(work.examples, work.batch))
    losses = [loss_of(net, *examples.batch(k, rows)) for k in range(min(SCORED, work.clients))]
    return float(torch.stack(losses).mean())


def differences(
    work: Work, rounds: Sequence[Round], far: float, loss: float, expected_loss: float
) -> list[str]:
    """The differences of a program's work from what was asked; empty: there are none.

    Args:
        far: `distance` of its final values from those of plain PyTorch.
        loss: Its `final_loss`.
        expected_loss: That of plain PyTorch.
    """
    found = []
    if wrong := {each.steps for each in rounds} - {work.steps}:
        found.append(f"{sorted(wrong)} steps in a round, not {work.steps}")
    if wrong := {each.rows for each in rounds} - {work.rows}:
        found.append(f"{sorted(wrong)} examples in a round, not {work.rows}")
    if not far <= FAR:
        found.append(f"final values are {far:.2g} of the way of training away, more than {FAR}")
    if not abs(loss - expected_loss) <= LOSS * abs(expected_loss):
        found.append(f"final loss {loss:.4f}, not {expected_loss:.4f}")
    return found
