"""Optimizers that step all tensors in few operations, and start without torch's compiler."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partialmethod
from typing import Any, cast

import torch
from torch import Tensor, nn

from rayfed.federation.passes import KINDS, settings_of
from rayfed.federation.train_config import TrainConfig

FEW_NUMBERS = 1_000_000
"""Most trained numbers for which an optimizer steps all tensors in one call on a CPU."""


def joint_optimizer(
    config: TrainConfig, parameters: Iterable[nn.Parameter], lr: float | None = None
) -> torch.optim.Optimizer:
    """As `Passes.optimizer`, with the same bits."""
    params = list(parameters)
    if is_fused(config, params):
        way: dict[str, Any] = {"fused": True}
    else:
        # All tensors in one call give the same bits in two thirds of the time, and need memory for copies.
        way = {"foreach": True if sum(p.numel() for p in params) <= FEW_NUMBERS else None}
    return _without_compiler(config.optimizer)(params, **settings_of(config, lr), **way)


@cache
def _without_compiler(name: str) -> Callable[..., torch.optim.Optimizer]:
    """An optimizer without the marks that keep torch.compile out of it.

    These import the compiler when an optimizer is first made, in every process, which takes a second. The
    functions that torch marked are the same: what wraps them is left out.
    """
    kind = KINDS[name]
    marked = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    bare: dict[str, Any] = {name: inspect.unwrap(getattr(kind, name)) for name in marked}
    bare["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    if name != "sgd":
        bare["_init_group"] = partialmethod(_with_joint_zeros, inspect.unwrap(cast(Any, kind)._init_group))
    return type(kind.__name__, (kind,), bare)


def _with_joint_zeros(
    optimizer: torch.optim.Optimizer, find: Callable[..., Any], group: dict[str, Any], *lists: Any
) -> Any:
    """Let fused Adam find its state, which begins as views of one tensor of zeros.

    Torch makes three tensors for each parameter in the first step of a client, in one operation each.
    """
    if group["fused"]:
        new = [p for p in group["params"] if p.grad is not None and not optimizer.state.get(p)]
        if len({(p.device, p.dtype) for p in new}) == 1 and all(p.is_contiguous() for p in new):
            optimizer.state.update(zip(new, _zeros_of(new), strict=True))
    return find(optimizer, group, *lists)


def _zeros_of(params: Sequence[Tensor]) -> Iterator[dict[str, Tensor]]:
    """The state with which Adam begins for each of these parameters of one type and device."""
    places = [-(-p.numel() // 64) * 64 for p in params]  # kernels read aligned values four at a time
    zeros = params[0].new_zeros(2 * sum(places) + len(params))
    first, second, counts = zeros.split([sum(places), sum(places), len(params)])
    means, squares, steps = first.split(places), second.split(places), counts.float().unbind()
    for p, mean, square, step in zip(params, means, squares, steps, strict=True):
        yield {
            "step": step,
            "exp_avg": mean[: p.numel()].view(p.shape),
            "exp_avg_sq": square[: p.numel()].view(p.shape),
        }


def is_fused(config: TrainConfig, params: Sequence[nn.Parameter]) -> bool:
    """Whether an optimizer steps all tensors in one kernel of CUDA.

    Fused Adam counts its steps on the GPU, so that each kept count would have to be copied there on its own.
    """
    counts = config.keep_optimizer and config.optimizer != "sgd"
    return not counts and all(parameter.device.type == "cuda" for parameter in params)
