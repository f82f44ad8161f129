"""HetLoRA: clients have LoRA adapters of different ranks, which are weighted by the norm of their products.

Cho et al., Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models, EMNLP 2024
[cho2024hetlora], a baseline of later work on unequal ranks. A client of rank k (`capacity.rank`) receives
the first k components; factors are padded with zeros and averaged with weights |B_k A_k|. In training a
penalty makes the last components small, and a client that succeeded gives them up and has a smaller rank
from its next visit on.

Our choices: each adapter has its own weights, a client gives up the last components of all adapters at
once, and the default of `local.lam`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from algorithms._lora import LoraServer
from rayfed import Broadcast, Client, Knob, Local, Method, ServerState, Update
from rayfed.federation.aggregation import A, B, by_layer
from rayfed.federation.local import pure
from rayfed.types import Batch, Fraction, NonNegative, cut_to_rank, rank_axes

RANK = "rank"


@dataclass(frozen=True)
class NormWeighted(LoraServer):
    """Server that weights the factors of each adapter by the Frobenius norm of their product."""

    sent_tensors_only: ClassVar[bool] = True

    def average(self, state: ServerState, updates: Sequence[Update], weights: Sequence[float]) -> ServerState:
        averaged = super().average(state, updates, weights)
        params = dict(averaged.params)
        for layer, (factors, _) in by_layer(updates, weights).items():
            norms = [product_norm(b, a) for b, a in factors]
            if total := sum(norms):
                for place, factor in enumerate((B, A)):
                    parts = [pair[place] * (n / total) for pair, n in zip(factors, norms, strict=True)]
                    params[f"{layer}.{factor}"] = torch.stack(parts).sum(0)
        return replace(averaged, params=params)


def product_norm(b: Tensor, a: Tensor) -> float:
    """Frobenius norm of B A."""
    b, a = b.double(), a.double()
    return float(((b.T @ b) * (a @ a.T)).sum().clamp_min(0).sqrt())


@dataclass(frozen=True)
class SelfPruning(Local):
    """Local training with a penalty on the last components, which are given up when they became smaller.

    Attributes:
        lam: Weight of the penalty: the sum over adapters of the norms of what would be given up of A times
            that of B.
        gamma: Share of the rank that is kept when components are given up; 1: the rank never changes.
    """

    lam: NonNegative = 1e-3
    gamma: Fraction = 0.99

    needs: ClassVar[frozenset[str]] = frozenset({"lora"})
    grouped: ClassVar[bool] = True

    def train(self, client: Client, sent: Broadcast) -> Update:
        if client.rank is None:
            live = client.trainable().items()
            client.rank = max((p.shape[axis] for name, p in live for axis in rank_axes(name)), default=1)
        client.rank = min(client.rank, client.store.get(RANK, client.rank))
        client.load(cut_to_rank(client.params(), client.rank))
        before = self.last_components(client).detach()
        update = super().train(client, sent)
        smaller = bool(self.last_components(client) < before)
        client.store[RANK] = max(1, int(self.gamma * client.rank)) if smaller else client.rank
        client.measure(rank=float(client.rank))
        return update

    @pure
    def loss(self, client: Client, sent: Broadcast, batch: Batch) -> Tensor:
        task = super().loss(client, sent, batch)
        return task + self.lam * self.last_components(client) if self.lam else task

    def last_components(self, client: Client) -> Tensor:
        """Sum over adapters of |A[k:rank]| |B[:, k:rank]|, where k is the rank if they are given up."""
        live, rank = client.trainable(), client.rank or 1
        kept = max(1, int(self.gamma * rank))
        total = torch.zeros((), device=client.device)
        for name in (n for n in live if n.endswith(A)):
            a, b = live[name][kept:rank], live[name.removesuffix(A) + B][:, kept:rank]
            total = total + torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b)
        return total


METHOD = Method(server=NormWeighted, local=SelfPruning, knob=Knob("local.lam", 0.0001, 0.1))
