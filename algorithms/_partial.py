"""Steps that train some of the tensors of a client, for methods that train in alternation."""

from collections.abc import Callable
from functools import partial

import torch

from rayfed import Broadcast, Client, Local
from rayfed.types import Batch


def partial_step(
    local: Local,
    client: Client,
    sent: Broadcast,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    trains: Callable[[str], bool],
) -> None:
    """One optimization step that leaves some tensors as they are.

    Their gradients are removed before gradients are clipped, and an optimizer skips tensors without one, so
    that neither momentum nor weight decay moves them.

    Args:
        local: Client half of the method, for its loss.
        sent: Message from the server.
        batch: Inputs and targets.
        optimizer: The optimizer of `client`.
        trains: Whether the tensor of this global name is trained.
    """
    optimizer.zero_grad()
    client.backward(partial(local.loss, client, sent), batch)
    for name, parameter in client.trainable().items():
        if not trains(name):
            parameter.grad = None
    client.clip_gradients()
    optimizer.step()
