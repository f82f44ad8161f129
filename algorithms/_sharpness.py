"""Local training with sharpness-aware gradients, for FedSAM and HarmoFL."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from rayfed import Broadcast, Client, Local
from rayfed.devices import same_draws
from rayfed.types import Batch


@dataclass(frozen=True)
class PerturbedLocal(Local):
    """Each step uses the gradient at perturbed weights: w + `radius` * g / |g|, with g the gradient at w.

    Foret et al., Sharpness-Aware Minimization, ICLR 2021, Eq. 2 and 3, not adaptive. Both passes use the same
    batch and the same random numbers (dropout), so a radius of 0 gives ordinary training.
    """

    grouped: ClassVar[bool] = True

    @property
    def radius(self) -> float:
        """L2 norm of the perturbation of the weights."""
        raise NotImplementedError

    def step(self, client: Client, sent: Broadcast, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
        live = list(client.trainable().values())
        loss = partial(self.loss, client, sent)
        optimizer.zero_grad()
        with same_draws(client.device):
            client.backward(loss, batch)
        before = perturb(live, self.radius)
        optimizer.zero_grad()
        client.backward(loss, batch)
        with torch.no_grad():
            for parameter, value in before:
                parameter.copy_(value)
        client.clip_gradients()
        optimizer.step()


@torch.no_grad()
def perturb(parameters: list[torch.nn.Parameter], radius: float) -> list[tuple[torch.nn.Parameter, Tensor]]:
    """Add `radius` times the gradients, divided by their global L2 norm (+ 1e-12), in place.

    Returns:
        Every parameter that has a gradient, with its value before the change.
    """
    moved = [(p, p.detach().clone(), p.grad) for p in parameters if p.grad is not None]
    if not moved:
        return []
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for _, _, grad in moved]))
    for parameter, _, grad in moved:
        parameter.add_(grad * (radius / (norm + 1e-12)))
    return [(parameter, value) for parameter, value, _ in moved]
