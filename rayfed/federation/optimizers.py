"""Makes the optimizers of clients, and carries their state from visit to visit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from rayfed.federation.train_config import TrainConfig

States: TypeAlias = dict[str, dict[str, Tensor]]
"""State of an optimizer: by global name of a parameter, its tensors such as `momentum_buffer`, `exp_avg`."""

FEW_NUMBERS = 1_000_000
"""Most trained numbers for which an optimizer steps all tensors in one call on a CPU."""


def make_optimizer(
    config: TrainConfig, parameters: Iterable[nn.Parameter], lr: float | None = None
) -> torch.optim.Optimizer:
    """A new optimizer as the config section `train` says, without state.

    Args:
        config: The config section `train`.
        parameters: What it trains.
        lr: Learning rate; None: that of the config.
    """
    params = list(parameters)
    rest: Any = {"lr": config.lr if lr is None else lr}
    if _is_fused(config, params):
        rest["fused"] = True
    else:
        # All tensors in one call give the same bits in two thirds of the time, and need memory for copies.
        rest["foreach"] = True if sum(p.numel() for p in params) <= FEW_NUMBERS else None
    rest["weight_decay"] = config.weight_decay
    if config.optimizer == "sgd":
        return torch.optim.SGD(params, momentum=config.momentum, **rest)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(params, betas=config.betas, eps=config.eps, **rest)


def _is_fused(config: TrainConfig, params: Sequence[nn.Parameter]) -> bool:
    """Whether an optimizer steps all tensors in one kernel of CUDA.

    Fused Adam counts its steps on the GPU, so that each kept count would have to be copied there on its own.
    """
    counts = config.keep_optimizer and config.optimizer != "sgd"
    return not counts and all(parameter.device.type == "cuda" for parameter in params)


def states_of(optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]) -> States:
    """Copies of an optimizer's state, by global name; parameters without state are left out.

    Args:
        optimizer: The optimizer.
        names: Its parameters by global name.
    """
    return {
        name: {key: value.detach().clone() for key, value in kept.items() if isinstance(value, Tensor)}
        for name, parameter in names.items()
        if (kept := optimizer.state.get(parameter))
    }


def resume(optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter], states: States) -> None:
    """Give a new optimizer the state of an earlier one; learning rates stay those of the new one.

    Args:
        optimizer: An optimizer without state.
        names: Its parameters by global name.
        states: What `states_of` returned; names that the optimizer does not have are ignored.
    """
    known = {id(parameter): states[name] for name, parameter in names.items() if name in states}
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    whole = optimizer.state_dict()
    whole["state"] = {
        position: {key: value.clone() for key, value in known[id(parameter)].items()}
        for position, parameter in enumerate(listed)
        if id(parameter) in known
    }
    optimizer.load_state_dict(whole)  # moves each tensor to the device of its parameter
