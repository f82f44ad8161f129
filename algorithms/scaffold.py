"""SCAFFOLD: control variates on the server and on every client correct each local step.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020
[karimireddy2020scaffold], Algorithm 1. The new control variate of a client is the mean gradient of its K
local steps. With plain SGD that is option II, c_i - c + (x - y_i) / (K eta_l). With momentum, Adam, weight
decay or clipping option II is no gradient, so the mean gradient is used there too. Blocks that a client
cannot hold keep their values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from rayfed import Broadcast, Client, Cohort, Knob, Local, Method, Server, ServerState, Update
from rayfed.federation.params import subtract, without_statistics
from rayfed.types import Params, Positive

CONTROL = "control"
CHANGE = "control_change"


@dataclass(frozen=True)
class ScaffoldServer(Server):
    """Takes a step along the mean update of the clients, and keeps the mean of their control variates.

    Attributes:
        weighting: Weight of a client in the mean; uniform in the paper.
        lr: Step size eta_g; with 1 the new parameters are the mean of the clients' parameters.
    """

    weighting: Literal["data_size", "uniform"] = "uniform"
    lr: Positive = 1.0

    offers: ClassVar[frozenset[str]] = frozenset({CONTROL})
    needs: ClassVar[frozenset[str]] = frozenset({CHANGE})

    def start(self, params: Params) -> ServerState:
        zeros = {name: torch.zeros_like(value) for name, value in without_statistics(params).items()}
        return super().start(params).share(**{CONTROL: zeros})

    def aggregate(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> ServerState:
        control = dict(state.shared[CONTROL])
        for update in updates:
            for name, change in update.extra[CHANGE].items():
                control[name] = control[name] + change / len(cohort.clients)
        return super().aggregate(state, cohort, updates).share(**{CONTROL: control})

    def take_step(self, old: Tensor, mean: Tensor, memory: dict[str, Any]) -> Tensor:
        return torch.lerp(old, mean, self.lr)


@dataclass(frozen=True)
class ScaffoldLocal(Local):
    """Adds c - c_i to every gradient; the client keeps c_i, the mean gradient of its last visit."""

    offers: ClassVar[frozenset[str]] = frozenset({CHANGE})
    needs: ClassVar[frozenset[str]] = frozenset({CONTROL})

    grouped: ClassVar[bool] = True

    def train(self, client: Client, sent: Broadcast) -> Update:
        live = {name: p for name, p in client.trainable().items() if name in sent.shared[CONTROL]}
        control = {name: sent.shared[CONTROL][name] for name in live}
        kept = client.store.get(CONTROL, {})
        own = {name: kept.get(name, torch.zeros_like(c)) for name, c in control.items()}
        correction = {name: c - own[name] for name, c in control.items()}
        total = {name: torch.zeros_like(p) for name, p in live.items()}
        optimizer = client.optimizer()
        for batch in client.batches():
            optimizer.zero_grad()
            client.backward(partial(self.loss, client, sent), batch)
            for name, p in live.items():
                if p.grad is not None:
                    total[name] += p.grad
                    p.grad += correction[name]
            client.clip_gradients()
            optimizer.step()
        new = {name: value / max(client.num_steps(), 1) for name, value in total.items()}
        client.store[CONTROL] = {**kept, **new}
        return client.update(extra={CHANGE: subtract(new, own)})


METHOD = Method(server=ScaffoldServer, local=ScaffoldLocal, knob=Knob("server.lr", 0.3, 3.0))
