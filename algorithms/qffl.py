"""q-FFL (q-FedAvg): an average step whose clients count the more the larger their loss.

Li, Sanjabi, Beirami, Smith, Fair Resource Allocation in Federated Learning, ICLR 2020, Algorithm 2, with the
loss of the received model. As in the paper's code, clients are not weighted by their data: q=0 is the plain
mean.

Differs from the paper: `norm=l2_sum` by default, because the squared norm assumes gradients: local training
with an adaptive optimizer moves every number by about the learning rate, and the squared norm then stalls.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

from torch import Tensor

from algorithms._losses import LossWeighted, fit_watched
from rayfed.federation.client import Client
from rayfed.federation.cohort import Cohort
from rayfed.federation.executor import Task
from rayfed.federation.local import Local
from rayfed.federation.method import Method
from rayfed.federation.params import subtract
from rayfed.federation.visit import fit
from rayfed.types import Broadcast, NonNegative, Params, Positive, ServerState, Update

Norm: TypeAlias = Literal["l2_sum", "l2_sq"]


@dataclass(frozen=True)
class FairServer(LossWeighted):
    """The q-FedAvg step.

    Attributes:
        q: How much large losses count; 0 is the plain mean.
        lr: Step size whose inverse estimates the Lipschitz constant; none: the clients' learning rate.
        norm: Of a client's move: the sum over tensors of plain L2 norms (the FedGCR authors' baseline), or
            the square of the global L2 norm (the paper).
        numerator: Whose loss scales a client's move: its own, or that of the last client for everybody (a
            slip of the FedGCR authors' baseline, to compare with).
    """

    q: NonNegative = 1.0
    lr: Positive | None = None
    norm: Norm = "l2_sum"
    numerator: Literal["own", "last"] = "own"

    def visit(self, local: Local) -> Task:
        return partial(fit_and_tell, local=local, running=self.loss == "running")

    def aggregate(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> ServerState:
        losses = self.losses(cohort, updates)
        rate = self.lr or updates[0].metrics["lr"]
        moves = losses if self.numerator == "own" else [losses[-1]] * len(losses)
        h = step_sizes(state.params, updates, losses, self.q, 1 / rate, self.norm)
        weights = [loss**self.q / rate for loss in moves]
        total = sum(h)
        self.record_weights(cohort, updates, [weight / total for weight in weights])
        return replace(state, params=fair_step(state.params, updates, weights, h))


def fit_and_tell(client: Client, sent: Broadcast, local: Local, running: bool) -> Update:
    """As `fit`, with the loss and the learning rate as metrics."""
    update = fit_watched(client, sent, local) if running else fit(client, sent, local, start="train")
    client.measure(lr=client.config.lr)
    return update


def step_sizes(
    start: Params, updates: Sequence[Update], losses: Sequence[float], q: float, lipschitz: float, norm: Norm
) -> list[float]:
    """Each client's share h_k of the denominator.

    Args:
        start: Parameters at the beginning of the round.
        updates: What clients sent.
        losses: Loss of each client, > 0.
        q: Exponent.
        lipschitz: Estimate of the Lipschitz constant, 1 / learning rate.
        norm: How the size of a move is measured.
    """
    found = []
    for update, loss in zip(updates, losses, strict=True):
        size = move_size(subtract(update.params, start), lipschitz, norm)
        found.append(q * loss ** (q - 1) * size + lipschitz * loss**q)
    return found


def move_size(move: Mapping[str, Tensor], lipschitz: float, norm: Norm) -> float:
    """Size of lipschitz * move: sum of the tensors' norms, or squared norm of all."""
    norms = [lipschitz * float(value.double().norm()) for value in move.values()]
    return sum(norms) if norm == "l2_sum" else sum(value**2 for value in norms)


def fair_step(
    start: Params, updates: Sequence[Update], weights: Sequence[float], h: Sequence[float]
) -> Params:
    """Start + sum_k weight_k (trained_k - start) / sum_k h_k, per name over its holders."""
    params = dict(start)
    for name, value in start.items():
        held = [k for k, update in enumerate(updates) if name in update.params]
        total = sum(h[k] for k in held)
        for k in held:
            params[name] = params[name] + (updates[k].params[name] - value) * (weights[k] / total)
    return params


METHOD = Method(server=FairServer)
