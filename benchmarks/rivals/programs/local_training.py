"""Local training as a user of PyTorch writes it, for the programs whose library leaves it to the user."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.rivals.workloads import Examples, Order, Work, loss_of, put, trained


def train(
    net: nn.Module, values: Any, work: Work, examples: Examples, order: Order, round: int, client: int
) -> tuple[int, int]:
    """Train a client from the values of the server; returns its numbers of steps and examples."""
    put(net, values)
    optimizer = torch.optim.SGD(trained(net).values(), lr=work.lr, momentum=work.momentum)
    steps = seen = 0
    for rows in order.batches(round, client):
        x, y = examples.batch(client, rows)
        optimizer.zero_grad()
        loss_of(net, x, y).backward()
        optimizer.step()
        steps, seen = steps + 1, seen + len(y)
    return steps, seen
