"""q-FFL (q-FedAvg): clients with a larger loss have a larger share in the mean update.

Li, Sanjabi, Beirami, Smith, Fair Resource Allocation in Federated Learning, ICLR 2020 [li2020qffl], Algorithm
2, with the loss of the received model. As in the paper's code, clients are not weighted by their data: q=0
gives the unweighted mean. Running means and variances of BatchNorm are no parameters: they are not in the
norm, and the unweighted mean of the clients' values is used.

Differs from the paper: the default is `norm=l2_sum`. The squared norm assumes that updates are gradients. An
adaptive optimizer changes every parameter by about the learning rate, so that the squared norm is very large
and the global step close to zero.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

from torch import Tensor

from algorithms._losses import LossKind, LossWeighted, fit_with_loss
from rayfed import Broadcast, Client, Cohort, Knob, Local, Method, ServerState, Update
from rayfed.federation.aggregation import mean_of_statistics
from rayfed.federation.executor import ClientTask
from rayfed.federation.params import subtract, without_statistics
from rayfed.types import NonNegative, Params, Positive

Norm: TypeAlias = Literal["l2_sum", "l2_sq"]


@dataclass(frozen=True)
class FairServer(LossWeighted):
    """Server with the step of q-FedAvg.

    Attributes:
        q: Exponent of the losses; 0 gives the unweighted mean.
        lr: Step size whose inverse estimates the Lipschitz constant; none: the clients' learning rate.
        norm: Norm of a client's update: sum over tensors of the L2 norms (the FedGCR authors' baseline), or
            square of the global L2 norm (the paper).
        numerator: Loss that scales a client's update: its own, or that of the last client for all clients (an
            error in the FedGCR authors' baseline, for comparison).
    """

    q: NonNegative = 1.0
    lr: Positive | None = None
    norm: Norm = "l2_sum"
    numerator: Literal["own", "last"] = "own"

    def training_task(self, local: Local) -> ClientTask:
        return partial(fit_with_rate, local=local, loss=self.loss)

    def aggregate(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> ServerState:
        losses = self.losses(cohort, updates)
        rate = self.lr or updates[0].metrics["lr"]
        scales = losses if self.numerator == "own" else [losses[-1]] * len(losses)
        h = step_sizes(state.params, updates, losses, self.q, 1 / rate, self.norm)
        weights = [loss**self.q / rate for loss in scales]
        total = sum(h)
        self.record_weights(cohort, updates, [weight / total for weight in weights])
        return replace(state, params=fair_step(state.params, updates, weights, h))


def fit_with_rate(client: Client, sent: Broadcast, local: Local, loss: LossKind) -> Update:
    """As `fit_with_loss`, and also returns the learning rate as a metric.

    Args:
        client: The client; its model holds `sent.params`.
        sent: Message from the server.
        local: Client half of the method.
        loss: Kind of loss, as of `LossWeighted`.
    """
    update = fit_with_loss(client, sent, local, loss)
    client.measure(lr=client.config.lr)
    return update


def step_sizes(
    start: Params, updates: Sequence[Update], losses: Sequence[float], q: float, lipschitz: float, norm: Norm
) -> list[float]:
    """Term h_k of each client in the denominator of the step; q-FFL, Algorithm 2.

    Args:
        start: Parameters at the beginning of the round.
        updates: Answers of clients.
        losses: Loss of each client, > 0.
        q: Exponent of the losses.
        lipschitz: Estimate of the Lipschitz constant, 1 / learning rate.
        norm: Norm of a client's update.
    """
    terms = []
    for update, loss in zip(updates, losses, strict=True):
        size = move_size(subtract(update.params, start), lipschitz, norm)
        terms.append(q * loss ** (q - 1) * size + lipschitz * loss**q)
    return terms


def move_size(move: Mapping[str, Tensor], lipschitz: float, norm: Norm) -> float:
    """Norm of lipschitz * move: sum over tensors of the L2 norms, or square of the global L2 norm.

    Args:
        move: Change of each tensor; BatchNorm statistics are left out.
        lipschitz: Factor of the change.
        norm: Kind of norm.
    """
    trained = [value.double() for value in without_statistics(move).values()]
    norms = [lipschitz * float(value.norm()) for value in trained]
    return sum(norms) if norm == "l2_sum" else sum(value**2 for value in norms)


def fair_step(
    start: Params, updates: Sequence[Update], weights: Sequence[float], h: Sequence[float]
) -> Params:
    """Start + sum_k weight_k (trained_k - start) / sum_k h_k, for each name over the clients that hold it.

    BatchNorm statistics are the unweighted mean over these clients instead.
    """
    params = {**start, **mean_of_statistics(updates)}
    for name, value in without_statistics(start).items():
        held = [k for k, update in enumerate(updates) if name in update.params]
        total = sum(h[k] for k in held)
        for k in held:
            params[name] = params[name] + (updates[k].params[name] - value) * (weights[k] / total)
    return params


METHOD = Method(server=FairServer, knob=Knob("server.q", 0.1, 5.0))
