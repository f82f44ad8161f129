"""FedNova: divides each client's update by its number of local steps before averaging.

Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS
2020 [wang2020fednova], Eq. 4 with w_i = p_i (section 5), and section 4.1 for momentum. The number of steps
is the norm |a|_1 of the weights with which the gradients of a visit are in its update: K for K steps of
plain SGD, and (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho) with momentum rho. Adam counts K.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from algorithms._lora import check_own_rule
from rayfed import Broadcast, Client, Local, Method, Server, ServerState, Update
from rayfed.federation.aggregation import mean_by_name
from rayfed.federation.params import subtract, without_statistics
from rayfed.federation.train_config import TrainConfig

STEPS = "effective_steps"


@dataclass(frozen=True)
class NovaServer(Server):
    """Moves by the mean number of steps times the mean update of one step."""

    needs: ClassVar[frozenset[str]] = frozenset({STEPS})

    def __post_init__(self) -> None:
        check_own_rule(self)

    def average(self, state: ServerState, updates: Sequence[Update], weights: Sequence[float]) -> ServerState:
        averaged = super().average(state, updates, weights)
        moves, steps = [], []
        for update in updates:
            count = update.extra[STEPS]
            changes = subtract(update.params, state.params)
            moves.append(replace(update, params={n: d / count for n, d in changes.items()}))
            steps.append(replace(update, params={n: torch.tensor(count) for n in changes}))
        direction = mean_by_name(moves, weights)
        length = mean_by_name(steps, weights)
        new = {
            name: state.params[name] + length[name] * move
            for name, move in without_statistics(direction).items()
        }
        return replace(averaged, params={**averaged.params, **new})


@dataclass(frozen=True)
class NovaLocal(Local):
    """FedAvg's local training, which reports the weight of its steps."""

    offers: ClassVar[frozenset[str]] = frozenset({STEPS})
    grouped: ClassVar[bool] = True

    def train(self, client: Client, sent: Broadcast) -> Update:
        update = super().train(client, sent)
        return replace(update, extra={STEPS: effective_steps(client.config, client.num_steps())})


def effective_steps(config: TrainConfig, steps: int) -> float:
    """The norm |a|_1 of a visit: `steps` with plain SGD and Adam, more with momentum; at least 1."""
    rho = config.momentum if config.optimizer == "sgd" else 0.0
    weight = total = 0.0
    for _ in range(max(steps, 1)):
        weight = 1 + rho * weight
        total += weight
    return total


METHOD = Method(server=NovaServer, local=NovaLocal, knob="it has no hyperparameter")
