"""Base class of servers whose weights depend on the losses of the clients, and checks of these losses.

A loss is raised to at least SMALLEST, so that a client with loss 0 has a positive weight. A loss that is NaN
or infinite ends the run with an error that names the client, because a weight would hide that its model or
data are faulty.
"""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from algorithms._arrays import Array, to_numpy
from rayfed import Broadcast, Client, Cohort, Local, Server, Update
from rayfed.devices import numbers, total
from rayfed.errors import NonFiniteClientError
from rayfed.federation.client_tasks import fit
from rayfed.federation.executor import ClientTask
from rayfed.types import Batch

SMALLEST = 1e-10
LossKind: TypeAlias = Literal["received", "running", "accumulated"]
RECEIVED, RUNNING, ACCUMULATED = "start/loss", "running/loss", "accumulated/loss"
KEYS: dict[LossKind, str] = {"received": RECEIVED, "running": RUNNING, "accumulated": ACCUMULATED}
"""Name of the metric of each kind of loss."""


@dataclass(frozen=True)
class LossWeighted(Server):
    """FedAvg whose weights depend on the clients' losses; override `weigh`.

    Attributes:
        loss: Which loss of a client counts: `received`: that of the received model on its training split, in
            evaluation mode; `running`: the mean of the local objective over the batches of this round's
            training; `accumulated`: its sum over the examples of the last local epoch, as Algorithm 1 of
            FedGCR returns it, where line 7 is read such that the cross entropy of an example counts once. The
            sum grows with the number of examples.
    """

    loss: LossKind = "received"

    def training_task(self, local: Local) -> ClientTask:
        return partial(fit_with_loss, local=local, loss=self.loss)

    def losses(self, cohort: Cohort, updates: Sequence[Update]) -> list[float]:
        """One loss per update, at least SMALLEST.

        Raises:
            NonFiniteClientError: A loss is NaN or infinite.
        """
        key = KEYS[self.loss]
        for update in updates:
            if not math.isfinite(update.metrics[key]):
                cause = f"its loss is {update.metrics[key]}; a smaller train.lr may help, or look at its data"
                raise NonFiniteClientError(update.client, cohort.round, "loss", cause)
        return [max(update.metrics[key], SMALLEST) for update in updates]


def fit_with_loss(client: Client, sent: Broadcast, local: Local, loss: LossKind) -> Update:
    """As `fit`, and returns a loss of the client as the metric `KEYS[loss]`.

    Args:
        client: The client; its model holds `sent.params`.
        sent: Message from the server.
        local: Client half of the method.
        loss: Kind of loss, as of `LossWeighted`.
    """
    if loss == "received":
        return fit(client, sent, local, start="train")
    return fit_watched(client, sent, local, loss)


def fit_watched(client: Client, sent: Broadcast, local: Local, loss: LossKind = "running") -> Update:
    """As `fit`, and measures what `local.loss` returned during training.

    The metric is running/loss, the mean of these values, or accumulated/loss, their sum over the examples of
    the last epoch.
    """
    seen: list[tuple[Tensor, int]] = []

    def loss_seen(client: Client, sent: Broadcast, batch: Batch) -> Tensor:
        value = local.loss(client, sent, batch)
        seen.append((value.detach(), len(batch[1])))
        return value

    watched = copy(local)
    object.__setattr__(watched, "loss", loss_seen)  # of this frozen object only: training calls self.loss
    update = fit(client, sent, watched)
    values = numbers([value for value, _ in seen])
    if loss == "accumulated":
        sizes = [size for _, size in seen]
        client.measure(**{ACCUMULATED: last_epoch_sum(values, sizes, client.data.size("train"))})
    else:
        client.measure(**{RUNNING: total(values) / max(len(values), 1)})
    return update


def last_epoch_sum(values: Sequence[float], sizes: Sequence[int], num_examples: int) -> float:
    """Sum of the loss over the examples of the last batches that together make one epoch.

    Args:
        values: Mean loss of each batch, in the order of training.
        sizes: Number of examples of each batch.
        num_examples: Number of training examples; with fewer examples in all batches, all are summed.
    """
    summed = 0.0
    remaining = num_examples
    for value, size in zip(reversed(values), reversed(sizes), strict=True):
        if remaining <= 0:
            break
        summed += value * size
        remaining -= size
    return summed


def check_losses(losses: Array) -> npt.NDArray[np.float64]:
    """Losses as float64, at least SMALLEST.

    Raises:
        ValueError: A loss is NaN, infinite or negative.
    """
    values = to_numpy(losses)
    bad = values[~np.isfinite(values) | (values < 0)]
    if bad.size:
        raise ValueError(f"loss {bad[0]} is not a finite number >= 0")
    return np.maximum(values, SMALLEST)
