"""Base class of servers whose weights depend on the losses of the clients, and checks of these losses.

A loss is raised to at least SMALLEST, so that a client with loss 0 has a positive weight. A loss that is NaN
or infinite ends the run with an error that names the client, because a weight would hide that its model or
data are faulty.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from algorithms._arrays import Array, to_numpy
from rayfed.errors import NonFiniteClientError
from rayfed.federation.client import Client
from rayfed.federation.cohort import Cohort
from rayfed.federation.executor import Task
from rayfed.federation.local import Local
from rayfed.federation.server import Server
from rayfed.federation.visit import fit
from rayfed.types import Batch, Broadcast, Update

SMALLEST = 1e-10
RECEIVED, RUNNING = "start/loss", "running/loss"


@dataclass(frozen=True)
class LossWeighted(Server):
    """FedAvg whose weights depend on the clients' losses; override `weigh`.

    Attributes:
        loss: Which loss of a client counts: that of the received model on its training split, in evaluation
            mode, or the mean over the batches of this round's training.
    """

    loss: Literal["received", "running"] = "received"

    def visit(self, local: Local) -> Task:
        return partial(fit, local=local, start="train") if self.loss == "received" else watching(local)

    def losses(self, cohort: Cohort, updates: Sequence[Update]) -> list[float]:
        """One loss per update, at least SMALLEST.

        Raises:
            NonFiniteClientError: A loss is NaN or infinite.
        """
        key = RECEIVED if self.loss == "received" else RUNNING
        for update in updates:
            if not math.isfinite(update.metrics[key]):
                cause = f"its loss is {update.metrics[key]}; a smaller train.lr may help, or look at its data"
                raise NonFiniteClientError(update.client, cohort.round, "loss", cause)
        return [max(update.metrics[key], SMALLEST) for update in updates]


def watching(local: Local) -> Task:
    """A visit that also reports the mean loss over the training batches."""
    return partial(fit_watched, local=local)


def fit_watched(client: Client, sent: Broadcast, local: Local) -> Update:
    """As `fit`, and measures running/loss: the mean of everything `local.loss` returned."""
    kind: type[Local] = type(local)

    class Watched(kind):  # type: ignore[valid-type, misc]  # the class of `local` is known only here
        def loss(self, client: Client, sent: Broadcast, batch: Batch) -> Tensor:
            value: Tensor = super().loss(client, sent, batch)
            client.measure(**{RUNNING: value})
            return value

    values = {field.name: getattr(local, field.name) for field in fields(local) if field.init}
    update = fit(client, sent, Watched(**values))
    if RUNNING not in client.measured:
        client.measure(**{RUNNING: 0.0})  # there was no batch
    return update


def checked(losses: Array) -> npt.NDArray[np.float64]:
    """Losses as float64, at least SMALLEST.

    Raises:
        ValueError: A loss is NaN, infinite or negative.
    """
    values = to_numpy(losses)
    bad = values[~np.isfinite(values) | (values < 0)]
    if bad.size:
        raise ValueError(f"loss {bad[0]} is not a finite number >= 0")
    return np.maximum(values, SMALLEST)
