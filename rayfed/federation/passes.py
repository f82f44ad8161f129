"""The computations of a client: its optimizer, the loss of a batch, the gradients, the steps of a training.

`Passes` is the plain form: one client at a time and one operation after the other, as papers write it down. A
worker may have another form that computes the same in fewer operations (`rayfed.executors.worker_passes`).
Servers, the halves of clients, models and tuning schemes do not know which one it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rayfed.federation.train_config import TrainConfig
from rayfed.models.backbone import Backbone
from rayfed.objective import Objective
from rayfed.types import Batch

KINDS: Mapping[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
"""Optimizers of torch by their names in the config."""


def settings_of(config: TrainConfig, lr: float | None) -> dict[str, Any]:
    """Arguments of the optimizer that the config section `train` names; `lr` in place of its rate."""
    common = {"lr": config.lr if lr is None else lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        return {**common, "momentum": config.momentum}
    return {**common, "betas": config.betas, "eps": config.eps}


def logits(output: Tensor | list[Tensor]) -> Tensor:
    """Logits of a model, shape (B, C, ...): its output, or the mean over its exits where it has several."""
    return output if isinstance(output, Tensor) else torch.stack(output).mean(0)


@dataclass(frozen=True)
class Passes:
    """Computes for one client after the other."""

    def optimizer(
        self, config: TrainConfig, parameters: Iterable[nn.Parameter], lr: float | None = None
    ) -> torch.optim.Optimizer:
        """A new optimizer as the config section `train` says, without state.

        Args:
            config: The config section `train`.
            parameters: What it trains.
            lr: Learning rate; None: that of the config.
        """
        return KINDS[config.optimizer](parameters, **settings_of(config, lr))

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        """Called with each optimizer of a client before its first step."""

    def loss(self, model: Backbone, objective: Objective, batch: Batch) -> Tensor:
        """Loss of one batch, a scalar with gradient."""
        x, y = batch
        return objective.loss(logits(model(x)), y)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss to those of the parameters."""
        loss.backward()

    def descend(self, loss: Callable[[Batch], Tensor], batch: Batch) -> None:
        """Add the gradients of the loss of a batch to those of the parameters."""
        self.backward(loss(batch))

    def steps(
        self,
        batches: Iterable[Batch],
        step: Callable[[Batch, torch.optim.Optimizer], None],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Take a step on each batch.

        Args:
            batches: The batches of the client.
            step: `Local.step` with the client and the message to it, as a partial function.
        """
        for batch in batches:
            step(batch, optimizer)


PLAIN = Passes()
