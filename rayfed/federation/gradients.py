"""Gradients of the loss of a batch, in one piece or added up over parts of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from rayfed.models.backbone import Backbone
from rayfed.types import Batch


def backward(model: Backbone, loss: Callable[[Batch], Tensor], batch: Batch, micro_batch: int | None) -> None:
    """Add the gradients of a loss to those of the parameters.

    Parts are weighted by their share of the rows, so that for a loss that is a mean over rows (plus terms
    that depend on the parameters only) the sum is the gradient of the whole batch, except for rounding.

    Args:
        model: The model, whose remembered frozen features are passed on to the parts.
        loss: Loss of a batch, a scalar with gradient.
        batch: Inputs, shape (B, ...), and targets.
        micro_batch: Largest number of rows of a part; None: the whole batch.
    """
    if micro_batch is None or len(batch[1]) <= micro_batch:
        loss(batch).backward()
        return
    num = len(batch[1])
    for part in _parts(model, batch, micro_batch):
        (loss(part) * (len(part[1]) / num)).backward()


def _parts(model: Backbone, batch: Batch, size: int) -> Iterator[Batch]:
    x, y = batch
    known = model.remembered_features(x)
    pieces = None if known is None else known.split(size)
    for i, (inputs, targets) in enumerate(zip(x.split(size), y.split(size), strict=True)):
        if pieces is not None:
            model.remember_frozen_features(inputs, pieces[i])
        yield inputs, targets
