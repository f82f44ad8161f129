"""Meta-learning updates of two steps: a step on one batch, then a step with the gradient after it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from rayfed.models.lora_layer import twice_differentiable

MetaUpdate: TypeAlias = Literal["sequential", "fo_restore", "second_order"]
InnerOptimizer: TypeAlias = Literal["client", "plain_sgd"]
Loss: TypeAlias = Callable[[], Tensor]


def meta_step(
    optimizer: torch.optim.Optimizer,
    first: Loss,
    second: Loss,
    update: MetaUpdate,
    inner_lr: float | None = None,
    clip: Callable[[], None] = lambda: None,
    inner: InnerOptimizer = "client",
) -> None:
    """Update the parameters w of the optimizer in two steps, one per loss.

    First w' = w - inner_lr * grad first(w); then, with g = grad second(w'):
    `sequential`: w <- w' - lr * g (BGP, Algorithm 2); `fo_restore`: w <- w - lr * g (first-order MAML);
    `second_order`: w <- w - lr * (I - inner_lr * H) g with the Hessian H of the first loss at w (MAML).

    Args:
        optimizer: Optimizer of the second step, and of the first one where `inner` is `client`.
        first: Computes the loss of the first batch; called twice with `second_order`.
        second: Computes the loss of the second batch.
        update: Kind of update, see above.
        inner_lr: Learning rate of the first step; None: that of the optimizer.
        clip: Called before each step; it may scale the gradients.
        inner: Optimizer of the first step: `client` for `optimizer`, or plain SGD. `second_order` always uses
            plain SGD. With `sequential` both steps share the state of `optimizer`, because both move the
            parameters that are kept. With `fo_restore` the first step neither uses nor changes its momentum,
            and changes no moment of Adam, because that step is taken back.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    start = [p.detach().clone() for p in params]
    rate = float(optimizer.param_groups[0]["lr"]) if inner_lr is None else inner_lr
    optimizer.zero_grad()
    first().backward()
    clip()
    if update == "second_order" or inner == "plain_sgd":
        _descend(params, rate)
    elif update == "sequential":
        _step_at(optimizer, rate)
    else:
        with _state_kept(optimizer):
            _step_at(optimizer, rate)
    optimizer.zero_grad()
    second().backward()
    if update != "sequential":
        _put(params, start)
    if update == "second_order":
        _subtract_curvature(params, first, rate)
    clip()
    optimizer.step()


def _step_at(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """One step of the optimizer with another learning rate."""
    own = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    for group, lr in zip(optimizer.param_groups, own, strict=True):
        group["lr"] = lr


@contextmanager
def _state_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Steps inside use no momentum, and leave momentum buffers and moments as they were."""
    state = {p: {k: _copy(v) for k, v in values.items()} for p, values in optimizer.state.items()}
    momenta = [group.get("momentum") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if "momentum" in group:
            group["momentum"] = 0.0
    try:
        yield
    finally:
        for group, momentum in zip(optimizer.param_groups, momenta, strict=True):
            if momentum is not None:
                group["momentum"] = momentum
        optimizer.state.clear()
        optimizer.state.update(state)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@torch.no_grad()
def _descend(params: list[Tensor], rate: float) -> None:
    for p in params:
        if p.grad is not None:
            p.sub_(p.grad, alpha=rate)


@torch.no_grad()
def _put(params: list[Tensor], values: list[Tensor]) -> None:
    for p, value in zip(params, values, strict=True):
        p.copy_(value)


def _subtract_curvature(params: list[Tensor], first: Loss, rate: float) -> None:
    """Subtract rate * H g from the gradients g, where H is the Hessian of the first loss at `params`."""
    live = [p for p in params if p.grad is not None]
    with twice_differentiable():
        slopes = torch.autograd.grad(
            first(), live, create_graph=True, allow_unused=True, materialize_grads=True
        )
        gradients = [p.grad.detach() for p in live if p.grad is not None]
        products = torch.autograd.grad(
            slopes, live, grad_outputs=gradients, allow_unused=True, materialize_grads=True
        )
    for p, g, hessian_g in zip(live, gradients, products, strict=True):
        p.grad = g - rate * hessian_g
