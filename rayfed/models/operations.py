"""Floating-point operations of a training step, counted by torch on a model without values."""

from __future__ import annotations

import torch
from torch import Tensor

from rayfed.models.backbone import Backbone

ROWS = 2, 4
"""Rows of the batches that are counted; trained BatchNorm layers refuse a batch of one."""


def step_operations(model: Backbone, keeps_features: bool) -> tuple[int, int]:
    """Operations of one forward and backward pass: those of any batch, and those of each of its rows.

    Counted are matrix products, convolutions and attention, a product and its sum as two operations, as
    torch's own counter does; a part of the network without trained tensors is not gone through backward.
    Only what a class prompt needs of a text tower does not depend on the number of rows.

    Args:
        model: The tuned model with its active blocks; best on the meta device, where nothing is computed.
        keeps_features: Features of a frozen network are computed once for the whole run, so that a step
            begins with them.
    """
    few = _counted(model, ROWS[0], keeps_features)
    if not model.text_is_live:
        return 0, few // ROWS[0]
    each = (_counted(model, ROWS[1], keeps_features) - few) // (ROWS[1] - ROWS[0])
    return few - ROWS[0] * each, each


def _counted(model: Backbone, rows: int, keeps_features: bool) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    model.train()
    x = _batch(model, rows)
    if keeps_features and (model.has_frozen_features or model.gc_net is not None):
        model.frozen_features(x)  # remembered for this batch
    with FlopCounterMode(display=False) as counter:
        output = model(x)
        outputs = output if isinstance(output, list | tuple) else [output]
        torch.stack([out.sum() for out in outputs]).sum().backward()
    model.zero_grad()
    return counter.get_total_flops()


def _batch(model: Backbone, rows: int) -> Tensor:
    return model.sample(rows)
