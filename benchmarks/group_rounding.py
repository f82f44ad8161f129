"""Rounding of grouped clients: updates of single clients and of groups, compared with float64.

    python -m benchmarks.group_rounding

For each tuning and optimizer, one round of four clients with 40 images in a domain: the largest relative
difference (norm of the difference of two updates over the norm of the update) between single clients and
groups of three, and of both from single clients that are trained in float64; and the share of the squared
difference between single clients and groups that is in the 1 % of the entries that differ most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from rayfed.engine.loop import run_rounds
from rayfed.engine.setup import Setup
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.client import Client
from rayfed.federation.cohort import TRAINING
from rayfed.federation.executor import Call
from rayfed.federation.local import Local
from rayfed.models.put_back import PutBack
from rayfed.testing import small_setup
from rayfed.types import Broadcast, Update

TUNINGS = ("lora", "bitfit", "gc_prompt", "visual_prompt", "head")
OPTIMIZERS = {
    "sgd": (),
    "adam": ("train.optimizer=adam", "train.lr=0.001"),
    "adam, eps 1e-4": ("train.optimizer=adam", "train.lr=0.001", "train.eps=1.0e-4"),
}
TO_FLOAT = Tensor.float


class Recording(InlineExecutor):
    """Keeps the change of all trained tensors of each client."""

    def map(self, calls: Sequence[Call]) -> list[Update | None]:
        answers = super().map(calls)
        self.moved = [
            torch.cat([(v - call.sent.params[n]).flatten().double() for n, v in update.params.items()])
            for call, update in zip(calls, answers, strict=True)
            if call.tag == TRAINING and update is not None
        ]
        return answers


class Exact(Local):
    """Trains with images in float64."""

    def prepare(self, client: Client, sent: Broadcast) -> None:
        client.transform = Tensor.double


def updates(setup: Setup, group: int, exact: bool = False) -> list[Tensor]:
    """Change of one round at each client.

    Args:
        setup: The experiment.
        group: Number of clients that share their passes.
        exact: Compute in float64.
    """
    executor = Recording(setup.context, setup.weights)
    start = setup.start
    local = setup.experiment.local
    if exact:
        executor.worker.model.double()
        executor.worker.put_back = PutBack(executor.worker.model)
        executor.worker._start = {n: v.double() for n, v in executor.worker._start.items()}
        start = {name: value.double() for name, value in start.items()}
        local = Exact()
    experiment = replace(setup.experiment, group=group, rounds=1, evaluate_every=0, local=local)
    list(run_rounds(experiment, executor, start))
    return executor.moved


def as_it_is(value: Tensor) -> Tensor:
    return value if value.is_floating_point() else TO_FLOAT(value)


def largest(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).norm() / a.norm()) for a, b in zip(one, other, strict=True))


def share_of_few(one: list[Tensor], other: list[Tensor]) -> float:
    squares = (torch.cat(one) - torch.cat(other)).square().sort(descending=True).values
    return float(squares[: len(squares) // 100].sum() / squares.sum())


def main() -> None:
    print("| tuning | optimizer | groups, single clients | single, float64 | groups, float64 | in 1 % |")
    print("|---|---|---:|---:|---:|---:|")
    for tuning in TUNINGS:
        for name, options in OPTIMIZERS.items():
            setup = small_setup(
                *("algorithm=fedavg", f"tuning={tuning}", "train.cache_features=false", "data.limit=40"),
                *("data.partition.clients_per_domain=2", "data.domains=[plain,street]", *options),
            )
            single, grouped = updates(setup, 1), updates(setup, 3)
            with patch.object(Tensor, "float", as_it_is):
                exact = updates(setup, 1, exact=True)
            pairs = (largest(single, grouped), largest(exact, single), largest(exact, grouped))
            cells = " | ".join(f"{value:.1e}" for value in pairs)
            print(f"| {tuning} | {name} | {cells} | {share_of_few(single, grouped):.2f} |", flush=True)


if __name__ == "__main__":
    main()
