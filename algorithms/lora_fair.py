"""LoRA-FAIR: averages A and B, and corrects B so that the product points as the mean of the products.

Bian et al., LoRA-FAIR: Federated LoRA Fine-Tuning with Aggregation and Initialization Refinement, ICCV 2025
[bian2025lorafair], Eq. 8: with the mean W of the clients' products, D minimizes 1 - cos(W, (B + D) A) +
lambda |D|, and clients continue from A and B + D.

Differs from the paper: the minimum is found with L-BFGS instead of SGD, whose steps the paper does not say.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from algorithms._lora import LoraServer
from rayfed import Knob, Method, ServerState, Update
from rayfed.federation.aggregation import A, B, by_layer, stack
from rayfed.types import Count, NonNegative


@dataclass(frozen=True)
class LoraFair(LoraServer):
    """Server that averages the factors and corrects the mean of B.

    Attributes:
        lam: Weight lambda of the size of the correction; with a large one there is no correction (FedIT).
        steps: Largest number of steps in the search for the minimum.
    """

    lam: NonNegative = 0.01
    steps: Count = 100

    sent_tensors_only: ClassVar[bool] = True

    def average(self, state: ServerState, updates: Sequence[Update], weights: Sequence[float]) -> ServerState:
        averaged = super().average(state, updates, weights)
        params = dict(averaged.params)
        for layer, (factors, shares) in by_layer(updates, weights).items():
            b, a = stack(factors, shares)
            name = f"{layer}.{B}"
            params[name] = correct(
                params[name], params[f"{layer}.{A}"], b.double() @ a.double(), self.lam, self.steps
            )
        return replace(averaged, params=params)


def correct(b: Tensor, a: Tensor, product: Tensor, lam: float, steps: int) -> Tensor:
    """B + D with the D of Eq. 8; B itself where D = 0 is a minimum, or where a product is zero.

    Args:
        b: Mean B, shape (d_out, r).
        a: Mean A, shape (r, d_in).
        product: Mean W of the clients' products, shape (d_out, d_in), in float64.
        lam: Weight of |D|, the Frobenius norm.
        steps: Largest number of steps.
    """
    start, right = b.double(), a.double()
    towards, gram = product @ right.T, right @ right.T
    size = product.norm()
    if not size * (start @ right).norm():
        return b
    change = torch.zeros_like(start, requires_grad=True)

    def apart() -> Tensor:
        moved = start + change
        return 1 - (towards * moved).sum() / (size * ((moved @ gram) * moved).sum().sqrt())

    (slope,) = torch.autograd.grad(apart(), change)
    if slope.norm() <= lam:
        return b
    optimizer = torch.optim.LBFGS(
        [change], max_iter=steps, line_search_fn="strong_wolfe", tolerance_change=1e-12
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = apart() + lam * torch.linalg.vector_norm(change)
        value.backward()
        return value

    optimizer.step(closure)
    return (start + change.detach()).type_as(b)


METHOD = Method(server=LoraFair, knob=Knob("server.lam", 0.001, 1.0))
