"""The client half of a method. Overriding nothing gives FedAvg's local SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rayfed.federation.client import Client
from rayfed.federation.cohort import Cohort
from rayfed.types import Batch, Broadcast, ServerState, Update


@dataclass(frozen=True)
class Local:
    """Local objective and local training. Holds hyperparameters only; state lives in `client.store`.

    Override the innermost method that does the job: `loss`, then `step`, then `train`.

    Attributes:
        offers: Names this half puts into `shared` or `extra`.
        needs: Names it requires from another part; checked before the run.
        deploys: Whether the method's headline accuracy is that of the global or of the personal models.
        tasks: The tasks it makes sense for (`rayfed.objective`); empty: any.
    """

    offers: ClassVar[frozenset[str]] = frozenset()
    needs: ClassVar[frozenset[str]] = frozenset()
    deploys: ClassVar[Literal["global", "personal"]] = "global"
    tasks: ClassVar[frozenset[str]] = frozenset()

    def exchange(self, state: ServerState, cohort: Cohort) -> ServerState:
        """Driver side, before training: learn from clients what all of them must know, and share it."""
        return state

    def prepare(self, client: Client, sent: Broadcast) -> None:
        """Before a model is scored or trained at a client: set `client.transform` here."""

    def train(self, client: Client, sent: Broadcast) -> Update:
        optimizer = client.optimizer()
        for batch in client.batches():
            self.step(client, sent, batch, optimizer)
        return client.update()

    def step(self, client: Client, sent: Broadcast, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        self.loss(client, sent, batch).backward()
        client.clip_gradients()
        optimizer.step()

    def loss(self, client: Client, sent: Broadcast, batch: Batch) -> Tensor:
        x, y = batch
        return client.objective.loss(logits(client.model(x)), y)

    def personalize(self, client: Client, sent: Broadcast, update: Update) -> None:
        """Make `client.model` the one this client would deploy: by default what it just trained."""
        client.load(update.params)


def logits(output: Tensor | list[Tensor]) -> Tensor:
    """Prediction of a model with one head, (B, C, ...), or the mean over the exits of one with several."""
    return output if isinstance(output, Tensor) else torch.stack(output).mean(0)
