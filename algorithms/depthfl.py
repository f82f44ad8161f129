"""DepthFL: prefix models with an exit after every few blocks; the exits of a client teach each other.

Kim et al., DepthFL: Depthwise Federated Learning for Heterogeneous Clients, ICLR 2023, Eq. 3 and 4, as the
baseline of FedRA (Su et al., 2024). Where exits sit and what predicts is a matter of `tuning=exits`.

Differs from the paper: exits are linear, on the frozen final norm; optimiser, steps and rounds are those of
the config.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Gt, Le
from torch import Tensor

from algorithms._blocks import BlockServer
from rayfed.federation.client import Client
from rayfed.federation.cohort import Cohort
from rayfed.federation.local import Local
from rayfed.federation.method import Method
from rayfed.types import Batch, Broadcast, Count, Positive, ServerState


@dataclass(frozen=True)
class PrefixServer(BlockServer):
    """Averaging over the first blocks and over the exits of those who own them."""


@dataclass(frozen=True)
class MutualDistillation(Local):
    """Cross entropy of every exit, and each exit imitates the others, more so as rounds go by.

    Attributes:
        T0: Round from which the imitation has full weight (T0 of the released codes).
        T0_frac: The same as a fraction of all rounds; replaces `T0`.
        T: Temperature of the imitation.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"exits"})

    T0: Count = 300
    T0_frac: Annotated[float, Gt(0), Le(1)] | None = None
    T: Positive = 1.0

    def exchange(self, state: ServerState, cohort: Cohort) -> ServerState:
        end = float(self.T0) if self.T0_frac is None else self.T0_frac * cohort.rounds
        return state.share(distillation=ramp(cohort.round, end))

    def loss(self, client: Client, sent: Broadcast, batch: Batch) -> Tensor:
        x, y = batch
        outputs = client.model(x)
        exits = [outputs] if isinstance(outputs, Tensor) else outputs
        return exit_loss(exits, y, sent.shared.get("distillation", 0.0), self.T)


def ramp(round: int, end: float) -> float:
    """Weight of the imitation: exp(-5 (1 - t / T0)^2) up to round T0, then 1."""
    return math.exp(-5 * (1 - min(round, end) / end) ** 2)


def exit_loss(exits: list[Tensor], y: Tensor, weight: float, temperature: float = 1.0) -> Tensor:
    """Sum over exits of cross entropy plus the mean divergence from the other exits.

    Args:
        exits: Logits of K exits, each (B, C).
        y: Labels, (B,).
        weight: Of the imitation.
        temperature: Softens both sides.
    """
    loss = torch.stack([F.cross_entropy(z, y) for z in exits]).sum()
    if len(exits) == 1:
        return loss
    pairs = [
        imitation(student, teacher, temperature)
        for i, student in enumerate(exits)
        for k, teacher in enumerate(exits)
        if k != i
    ]
    return loss + weight / (len(exits) - 1) * torch.stack(pairs).sum()


def imitation(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(teacher || student), averaged over the batch; no gradient reaches the teacher."""
    target = torch.softmax(teacher.detach() / temperature, -1) + 1e-7
    log_student = torch.log_softmax(student / temperature, -1)
    return temperature**2 * (target * (target.log() - log_student)).sum(-1).mean()


METHOD = Method(server=PrefixServer, local=MutualDistillation)
