"""FedDyn: a linear and a quadratic term in the local loss, and a correction on the server.

Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, Algorithm 1. State is kept by
global name, so clients may hold other blocks every round. The correction is a hyperparameter of every server
that deals out blocks: `server.feddyn_alpha=0.1 local.name=feddyn` makes InclusiveFL or AllSmall its base too.

Differs from the paper: a name is averaged over those who hold it, and h moves by their sum over all N
clients.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from algorithms._blocks import PERSIST, SHARE, BlockServer
from rayfed.federation.client import Client
from rayfed.federation.local import Local
from rayfed.federation.method import Method
from rayfed.federation.params import sq_distance, subtract
from rayfed.types import Batch, Broadcast, NonNegative, Update


@dataclass(frozen=True)
class DynamicServer(BlockServer):
    """Averaging over the first blocks, uniform over holders, with FedDyn's correction."""

    feddyn_alpha: NonNegative = 0.1


@dataclass(frozen=True)
class DynamicRegularization(Local):
    """Local loss minus <g, x> plus alpha / 2 ||x - x_t||^2; the client keeps g for every name it held."""

    offers: ClassVar[frozenset[str]] = frozenset({PERSIST})
    needs: ClassVar[frozenset[str]] = frozenset({SHARE})

    def train(self, client: Client, sent: Broadcast) -> Update:
        start = {name: value.detach().clone() for name, value in client.trainable().items()}
        update = super().train(client, sent)
        g, alpha = dict(client.store.get("g", {})), float(sent.shared[SHARE])
        for name, move in subtract({n: update.params[n] for n in start}, _on_cpu(start)).items():
            g[name] = g[name] - alpha * move if name in g else -alpha * move
        client.store["g"] = g
        return update

    def loss(self, client: Client, sent: Broadcast, batch: Batch) -> Tensor:
        live, g, alpha = client.trainable(), client.store.get("g", {}), float(sent.shared[SHARE])
        loss = super().loss(client, sent, batch)
        if sent.params:
            start = {name: value.to(loss.device) for name, value in sent.params.items() if name in live}
            loss = loss + alpha / 2 * sq_distance({name: live[name] for name in start}, start)
        linear = [(g[name].to(loss.device) * value).sum() for name, value in live.items() if name in g]
        return loss - torch.stack(linear).sum() if linear else loss


def _on_cpu(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in params.items()}


METHOD = Method(server=DynamicServer, local=DynamicRegularization)
