"""Start values of the matrices between LoRA's factors, taken from the first step of full training.

Ponkshe et al., Initialization using Update Approximation is a Silver Bullet for Extremely Efficient Low-Rank
Fine-Tuning, 2024 (LoRA-SB) [ponkshe2024lorasb], with which Fed-SB [singhal2025fedsb] begins, and its released
code: the change D that one step of full training would make in a layer, from gradients of some examples, is
split into singular vectors and values; B and A are the first vectors, and B C A times alpha / rank is the
best approximation of D of this rank. With AdamW, as there, D is -lr times the sign of the gradient.

Differs from the released code: examples are the first batch of each client instead of 170 of all together,
and the rate is that of the first step, which there is the final one over the number of steps of the warm-up.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from rayfed.devices import settings_restored
from rayfed.engine.loop import RoundPlan
from rayfed.errors import ConfigError
from rayfed.executors.worker import ClientContext, Weights, Worker
from rayfed.federation.client import Client
from rayfed.federation.executor import Call
from rayfed.federation.local import Local
from rayfed.federation.passes import PLAIN
from rayfed.federation.train_config import TrainConfig
from rayfed.models.named_tensors import global_name
from rayfed.models.shared_weights import as_array
from rayfed.seeds import generator
from rayfed.terminal.console import stage
from rayfed.tuning.lora import Lora, core_sites
from rayfed.types import Broadcast, Params, Row, Update

MOST_CLIENTS = 32
"""Clients whose first batch is used; with more clients, as many are drawn."""

EXCHANGE = "core_start"
"""Name of the exchange in which clients compute gradients."""

FACTORS = "core_factors"
"""Name of the exchange in which all clients receive A and B."""


@settings_restored()
def core_start(
    context: ClientContext, weights: Weights, start: Params, experiment: RoundPlan
) -> tuple[Weights, Params, tuple[Row, ...]]:
    """All initial tensors, those that are sent, and what clients sent and received to compute them.

    The clients that compute gradients receive the trained tensors and answer a gradient of each layer. Then
    every client receives A and B; C is in the first message of the training.

    Args:
        context: What a process needs to run clients.
        weights: All initial tensors by module name.
        start: Initial values of the tensors that are sent and trained, by global name.
        experiment: The clients and their method.

    Raises:
        ConfigError: The tuning begins with gradients of the clients, which the noise of the channel should
            hide.
    """
    scheme = getattr(context.tuning, "inner", context.tuning)
    if not (isinstance(scheme, Lora) and scheme.core and scheme.core_start == "gradient"):
        return weights, start, ()
    if experiment.channel.noise:
        raise ConfigError(
            "tuning.core_start: 'gradient' computes A, B and C from gradients of the clients, to which the "
            "channel adds no noise; set tuning.core_start=random, or leave noise out"
        )
    stage("computing the first gradients")
    clients = [*experiment.clients]
    worker = Worker(context, weights)
    order = generator(context.seed, "core start").permutation(len(clients))
    task, sent = partial(gradients, experiment.local), Broadcast(round=0, params=start)
    calls = [
        Call(client=clients[i], task=task, tag="core start", sent=sent) for i in sorted(order[:MOST_CLIENTS])
    ]
    updates = [worker.call(call, {})[0] for call in calls]
    total = sum(update.num_examples for update in updates)
    values, own, shared = dict(weights), dict(start), 0
    for site in core_sites(context.skeleton()):
        parts = [update.extra[site.layer] * (update.num_examples / total) for update in updates]
        change = first_step(torch.stack(parts).sum(0), context.train, context.train.rate(0, context.rounds))
        for name, value in zip(
            (site.a, site.b, site.c), factor_update(change, site.rank, site.scale), strict=True
        ):
            values[name] = as_array(value, weights[name])
        shared += values[site.a].nbytes + values[site.b].nbytes
        own[global_name(site.c)] = torch.from_numpy(values[site.c]).clone()
    transfers = [
        {"exchange": EXCHANGE, "client": call.client, "down": sent.num_bytes(), "up": update.num_bytes()}
        for call, update in zip(calls, updates, strict=True)
    ]
    transfers += [{"exchange": FACTORS, "client": cid, "down": shared, "up": 0} for cid in clients]
    return values, own, tuple(transfers)


def gradients(local: Local, client: Client, sent: Broadcast) -> Update:
    """Gradients of the loss of a client's first batch, by the names of the layers with a core.

    Those of the frozen weights, shape (d_out, d_in), of which autograd computes none.

    Args:
        local: The client half, whose loss is derived.
        sent: The message to it.
    """
    batch = next(client.batches())
    sums: dict[str, Tensor] = {}

    def watch(name: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        rows = inputs[0].detach().flatten(0, -2)

        def add(grad: Tensor) -> None:
            product = grad.flatten(0, -2).mT.float() @ rows.float()
            sums[name] = sums[name] + product if name in sums else product

        output.register_hook(add)

    layers = dict(client.model.named_modules())
    names = [site.layer for site in core_sites(client.model)]
    hooks = [layers[name].register_forward_hook(partial(watch, name)) for name in names]
    try:
        client.backward(partial(local.loss, client, sent), batch)
    finally:
        for hook in hooks:
            hook.remove()
    return Update(client=client.id, num_examples=len(batch[1]), extra=sums)


def first_step(gradient: Tensor, train: TrainConfig, lr: float) -> Tensor:
    """The change of a weight in the first step of the optimizer of the run, shape as of the gradient."""
    weight = nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient
    PLAIN.optimizer(train, [weight], lr).step()
    return weight.detach()


def factor_update(change: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Factors whose product scale B C A is the best approximation of a change of this rank.

    Args:
        change: Shape (d_out, d_in).
        rank: Rank r; where the change has fewer singular values, the rest of the factors is zero.
        scale: alpha / rank.

    Returns:
        A, shape (r, d_in), and B, shape (d_out, r), with orthonormal rows and columns, and C, shape (r, r).
    """
    u, values, vt = torch.linalg.svd(change.double(), full_matrices=False)
    a, b, c = (change.new_zeros(shape) for shape in ((rank, vt.shape[1]), (len(u), rank), (rank, rank)))
    k = min(rank, len(values))
    a[:k], b[:, :k] = vt[:k], u[:, :k]
    c.diagonal()[:k] = values[:k] / scale
    return a, b, c
