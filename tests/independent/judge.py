"""FedAvg by hand in plain PyTorch: what a run of RayFed with `method="fedavg", tuning="full"` computes.

Of RayFed it knows the random stream of a client's call and nothing else. What holds for a network:

- Each call begins with a copy of the network as it was handed over, into which the server's values are put:
  no counter, attribute or vector of spectral norm goes from one client to another, or to the next round.
- The server's values are all parameters and all buffers of floats; it averages what clients send, weighted by
  their numbers of training examples, and rounds once: sums here are in float64. The network's own `train()`
  and `eval()` decide what its layers do.
- In one stream of a call, the order of the examples comes from its generator, and dropout from torch's own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rayfed.seeds import derive, use_seed

Splits = Mapping[str, tuple[Tensor, Tensor]]
POWER_ITERATION = ("._u", "._v", "weight_u", "weight_v")
"""Ends of the names of the vectors of spectral norm, of which a mean would mean nothing."""


def fedavg(
    net: nn.Module, clients: Mapping[str, Splits], rounds: int, seed: int, lr: float, batch_size: int
) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """The network after all rounds of SGD with momentum 0.9, and loss and accuracy after each of them."""
    values, history = tensors(net), []
    num = {client: len(splits["train"][1]) for client, splits in clients.items()}
    for round in range(rounds):
        sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in values.items()}
        for client, splits in clients.items():
            own = with_values(net, values).train()
            optimizer = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], lr, momentum=0.9)
            x, y = splits["train"]
            with use_seed(derive(seed, "fit", round, client)) as stream:
                for rows in torch.randperm(len(y), generator=stream).split(batch_size):
                    optimizer.zero_grad()
                    cross_entropy(outputs(own(x[rows])), y[rows]).backward()
                    optimizer.step()
            for name, value in tensors(own).items():
                sums[name] += value.double() * num[client]
        values = {name: (total / sum(num.values())).to(values[name].dtype) for name, total in sums.items()}
        history.append(scores(net, values, clients))
    return with_values(net, values), history


@torch.no_grad()
def scores(net: nn.Module, values: Mapping[str, Tensor], clients: Mapping[str, Splits]) -> dict[str, Tensor]:
    """Loss and accuracy of the server's model on the test examples of a client, as means over clients."""
    losses, shares = [], []
    for splits in clients.values():
        x, y = splits["test"]
        found = outputs(with_values(net, values).eval()(x.clone()))
        losses.append(cross_entropy(found, y))
        shares.append((found.argmax(1) == y).to(found.dtype).mean())
    return {"loss": torch.stack(losses).mean(), "accuracy": torch.stack(shares).mean()}


def tensors(net: nn.Module) -> dict[str, Tensor]:
    """Copies of what the server averages, by name."""
    every = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    averaged = {n: t for n, t in every.items() if t.is_floating_point() and not n.endswith(POWER_ITERATION)}
    return {name: tensor.detach().clone() for name, tensor in averaged.items()}


@torch.no_grad()
def with_values(net: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the network as it was handed over, with other values."""
    own = copy.deepcopy(net)
    every = {**dict(own.named_parameters()), **dict(own.named_buffers())}
    for name, value in values.items():
        every[name].copy_(value)
    return own


def outputs(returned: Any) -> Tensor:
    """The outputs of the classes in what a network returns."""
    if isinstance(returned, Tensor):
        return returned
    return returned["logits"] if isinstance(returned, Mapping) else returned.logits
