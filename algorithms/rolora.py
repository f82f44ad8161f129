"""RoLoRA: trains and averages B of every LoRA adapter in one round and A in the next, in alternation.

Chen et al., Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA, NeurIPS 2025
[chen2025rolora], a baseline of later work on federated LoRA. All clients of a round have the same value of
the other factor, so that the mean of the factors gives the mean of the products exactly. It begins with B,
because A has no gradient while B is 0. The head is trained in every round.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from algorithms._partial import partial_step
from rayfed import Broadcast, Client, Local, Method, Update
from rayfed.types import Batch


def at_rest(round: int) -> str:
    """The factor that is not trained in a round, numbered from 0."""
    return ".lora_A" if round % 2 == 0 else ".lora_B"


@dataclass(frozen=True)
class RoLora(Local):
    """Local training of one factor, which alone is sent back."""

    needs: ClassVar[frozenset[str]] = frozenset({"lora"})
    grouped: ClassVar[bool] = True

    def train(self, client: Client, sent: Broadcast) -> Update:
        update = super().train(client, sent)
        other = at_rest(sent.round)
        return client.update(params={n: v for n, v in update.params.items() if not n.endswith(other)})

    def step(self, client: Client, sent: Broadcast, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
        other = at_rest(sent.round)
        partial_step(self, client, sent, batch, optimizer, lambda name: not name.endswith(other))


METHOD = Method(local=RoLora, knob="it has no hyperparameter")
