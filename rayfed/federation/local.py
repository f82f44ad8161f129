"""The client half of a method. Overriding nothing gives FedAvg's local SGD."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from rayfed.federation.client import Client
from rayfed.federation.cohort import Cohort
from rayfed.models.backbone import Backbone
from rayfed.types import Batch, Broadcast, ServerState, Update

F = TypeVar("F", bound=Callable[..., Tensor])


def pure(loss: F) -> F:
    """Mark a loss as a function of the model's values, the message, the store and the batch.

    It is made of operations of torch that are the same whatever these values are. It reads no number of a
    tensor, asks for no other data of the client, draws nothing, and keeps nothing but by `client.measure`.

    Args:
        loss: A method of a `Local` with the arguments of `Local.loss`.
    """
    about: Any = loss
    about.is_pure = True
    return loss


@dataclass(frozen=True)
class Local:
    """Local objective and local training. Holds hyperparameters only; state belongs in `client.store`.

    A method overrides the smallest part that is enough: `loss`, else `step`, else `train`.

    Attributes:
        stays: Tensors that stay at the client: it keeps its own values from round to round, the server never
            sees them, and every client is scored with its own. `head`, `norm`, `lora_A`, `lora_B`, or regular
            expressions that match whole global names (`rayfed.federation.tensors_that_stay`).
        offers: Names of what this half puts into `shared` or `extra`.
        needs: Names that the server, the local half or the tuning must offer; checked before the run.
        deploys: Which model the accuracy columns of the results are about: the global model, or the personal
            models of the clients.
        tasks: Tasks this half can be used for (`rayfed.objective`); empty: all.
        not_for: Tasks this half cannot be used for, such as that of language models, whose features are those
            of tokens and not of examples.
        tuning: Options of the tuning scheme that this half sets, by name (as `Server.tuning`).
        grouped: Whether clients may share their passes (`train.group`) although this half has its own `train`
            or `step`; they may where the model is used through `client.model` only.
        trained_in_extra: Whether answers have trained values in `extra`, where no stage of `channel` and no
            attack changes them, so that both are refused.
        changes_passes: Whether this half changes what the network computes between two passes, so that it can
            be neither compiled nor recorded.
    """

    stays: tuple[str, ...] = field(default=(), kw_only=True)

    offers: ClassVar[frozenset[str]] = frozenset()
    needs: ClassVar[frozenset[str]] = frozenset()
    tuning: ClassVar[Mapping[str, object]] = {}
    deploys: ClassVar[Literal["global", "personal"]] = "global"
    tasks: ClassVar[frozenset[str]] = frozenset()
    not_for: ClassVar[frozenset[str]] = frozenset()
    grouped: ClassVar[bool] = False
    trained_in_extra: ClassVar[bool] = False
    changes_passes: ClassVar[bool] = False

    @property
    def averages_rows(self) -> bool:
        """Whether the loss of a batch is the mean over its rows, plus terms of the parameters only.

        Only then may `train.micro_batch` compute the gradients of a batch in parts. A half that calls
        `backward` itself instead of `client.backward` must say False.
        """
        return True

    @property
    def needs_curvature(self) -> bool:
        """Whether steps need second derivatives of the network, which `train.compile` does not offer."""
        return False

    def check(self, model: Backbone) -> None:
        """Check before a run that this half can train a model.

        Args:
            model: The tuned model without values (on torch's meta device).

        Raises:
            ConfigError: It cannot; says what to choose instead.
        """

    def exchange(self, state: ServerState, cohort: Cohort) -> ServerState:
        """Exchanges before the training of a round; runs on the driver.

        Collect here from clients what all of them need, and put it into `state.shared`.
        """
        return state

    def prepare(self, client: Client, sent: Broadcast) -> None:
        """Runs at the client before a model is trained or scored; set `client.transform` here."""

    def train(self, client: Client, sent: Broadcast) -> Update:
        """Train `client.model`, which holds the received values, and return the answer to the server."""
        optimizer = client.optimizer()
        client.passes.steps(client.batches(), partial(self.step, client, sent), optimizer)
        return client.update()

    def step(self, client: Client, sent: Broadcast, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
        """One optimization step on one batch."""
        optimizer.zero_grad()
        client.backward(partial(self.loss, client, sent), batch)
        client.clip_gradients()
        optimizer.step()

    @pure
    def loss(self, client: Client, sent: Broadcast, batch: Batch) -> Tensor:
        """Loss of one batch, a scalar with gradient."""
        return client.passes.loss(client.model, client.objective, batch)

    def personalize(self, client: Client, sent: Broadcast, update: Update) -> None:
        """Load the model that this client would deploy into `client.model`; by default the trained one.

        Where personal models are scored, this also runs at clients that did not train in the round, with
        their present values as `update`: those that they received, and those that stayed. What a client keeps
        for itself is in `client.store`, which is empty until it trains: `client.store.get("own", {})`. What
        is changed in the store is put back.

        Args:
            sent: Message from the server.
            update: The answer of `train`.
        """
        client.load(update.params)
