"""DepthFL: clients train the first blocks, with several exits that learn from each other by distillation.

Kim et al., DepthFL: Depthwise Federated Learning for Heterogeneous Clients, ICLR 2023 [kim2023depthfl], Eq. 3
and 4, as the baseline of FedRA [su2024fedra], section 4.1. The tuning `exits` decides where the exits are and
which of them predict.

Differs from the paper: exits are linear layers on the frozen final norm; optimizer, steps and rounds are
those of the config.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Gt, Le
from torch import Tensor

from algorithms._blocks import BlockServer
from rayfed import Broadcast, Client, Cohort, Knob, Local, Method, ServerState
from rayfed.types import Batch, Count, Positive


@dataclass(frozen=True)
class PrefixServer(BlockServer):
    """Averages blocks and exits over the clients that hold them."""


@dataclass(frozen=True)
class MutualDistillation(Local):
    """Cross entropy of every exit plus mutual distillation between exits, with increasing weight.

    Attributes:
        T0: Round from which distillation has weight 1 (T0 of the released codes).
        T0_frac: The same as a fraction of all rounds; replaces `T0`.
        T: Temperature of the distillation.
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
    """Weight of the distillation: exp(-5 (1 - round / end)^2) up to round `end`, then 1."""
    return math.exp(-5 * (1 - min(round, end) / end) ** 2)


def exit_loss(exits: list[Tensor], y: Tensor, weight: float, temperature: float = 1.0) -> Tensor:
    """Sum over exits of cross entropy plus `weight` times the mean KL divergence from the other exits.

    Args:
        exits: Logits of K exits, each of shape (B, C).
        y: Labels, shape (B,).
        weight: Weight of the distillation.
        temperature: Divides the logits of both exits in the divergence.
    """
    loss = torch.stack([F.cross_entropy(z, y) for z in exits]).sum()
    if len(exits) == 1:
        return loss
    pairs = [
        distillation_loss(student, teacher, temperature)
        for i, student in enumerate(exits)
        for k, teacher in enumerate(exits)
        if k != i
    ]
    return loss + weight / (len(exits) - 1) * torch.stack(pairs).sum()


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(teacher || student), mean over the batch; no gradient flows to the teacher.

    Args:
        student: Logits, shape (B, C).
        teacher: Logits, shape (B, C).
        temperature: Divides both; the divergence is multiplied by its square.
    """
    target = torch.softmax(teacher.detach() / temperature, -1) + 1e-7
    log_student = torch.log_softmax(student / temperature, -1)
    return temperature**2 * (target * (target.log() - log_student)).sum(-1).mean()


METHOD = Method(server=PrefixServer, local=MutualDistillation, knob=Knob("local.T", 0.5, 4.0))
