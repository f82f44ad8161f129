"""FedDyn: dynamic regularization of the local loss, and a correction on the server.

Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021 [acar2021feddyn], Algorithm 1.
State is kept by global name, so that clients may hold different blocks in each round; a network without
uniform blocks is held as a whole. Every server of
`algorithms/_blocks.py` has the correction as an option: `server.feddyn_alpha=0.1 local.name=feddyn` combines
it with InclusiveFL or AllSmall.

Differs from the paper: each name is averaged over the clients that hold it, and h changes by the sum of their
changes divided by the number N of all clients.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from algorithms._blocks import FEDDYN_ALPHA, FEDDYN_MEAN, FEDDYN_UPDATE, BlockServer
from rayfed import Broadcast, Client, Knob, Local, Method, Update
from rayfed.federation.local import pure
from rayfed.federation.params import sq_distance, subtract
from rayfed.types import Batch, NonNegative


@dataclass(frozen=True)
class DynamicServer(BlockServer):
    """Uniform mean of each block over its holders, with FedDyn's correction.

    Frozen blocks are at the clients from the beginning, as with FedAvg; only the rules that choose blocks for
    a client count their download.
    """

    frozen_cache: Literal["none", "lru", "all", "preinstalled"] = "preinstalled"
    feddyn_alpha: NonNegative = 0.1

    blocks_optional: ClassVar[bool] = True


@dataclass(frozen=True)
class DynamicRegularization(Local):
    """Local loss minus <g, x> plus alpha / 2 ||x - x_t||^2.

    The client keeps g in its store for every name that it has held.
    """

    offers: ClassVar[frozenset[str]] = frozenset({FEDDYN_UPDATE})
    needs: ClassVar[frozenset[str]] = frozenset({FEDDYN_ALPHA})

    grouped: ClassVar[bool] = True

    def train(self, client: Client, sent: Broadcast) -> Update:
        start = {name: value.detach().clone() for name, value in client.trainable().items()}
        update = super().train(client, sent)
        g = dict(client.store.get("g", {}))
        alpha = alpha_of(client, sent)
        for name, move in subtract({n: update.params[n] for n in start}, start).items():
            g[name] = g[name] - alpha * move if name in g else -alpha * move
        client.store["g"] = g
        return update

    @pure
    def loss(self, client: Client, sent: Broadcast, batch: Batch) -> Tensor:
        live = client.trainable()
        g = client.store.get("g", {})
        alpha = alpha_of(client, sent)
        loss = super().loss(client, sent, batch)
        if sent.params:
            start = {name: value for name, value in sent.params.items() if name in live}
            loss = loss + alpha / 2 * sq_distance({name: live[name] for name in start}, start)
        linear = [(g[name] * value).sum() for name, value in live.items() if name in g]
        return loss - torch.stack(linear).sum() if linear else loss


def alpha_of(client: Client, sent: Broadcast) -> float:
    """Strength of a client's regularization: alpha, or alpha_i of the released code (`feddyn_alpha_by`)."""
    alpha = float(sent.shared[FEDDYN_ALPHA])
    mean = sent.shared.get(FEDDYN_MEAN)
    return alpha if mean is None else alpha * float(mean) / client.data.size("train")


METHOD = Method(
    server=DynamicServer, local=DynamicRegularization, knob=Knob("server.feddyn_alpha", 0.01, 1.0)
)
