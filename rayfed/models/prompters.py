"""Modules that compute the learned vectors of class prompts, which a tuning scheme puts on a text side.

Each maps (context, names, images) to vectors in a form that `TextSide` accepts: the trained vectors
`TextSide.context`; features of the class prompts by the frozen tower, shape (C, width); and features of the
images that are scored, or None. Letters in shapes: C classes, M vectors, W size of a token's embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LowRankPart(nn.Module):
    """Adds a matrix U V of low rank r to the context, which has shape (M, W).

    Attributes:
        u: Shape (M, r).
        v: Shape (r, W).
    """

    def __init__(self, length: int, rank: int, width: int, init_std: float) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.empty(length, rank))
        self.v = nn.Parameter(torch.empty(rank, width))
        for factor in (self.u, self.v):
            nn.init.normal_(factor, std=init_std)

    def forward(self, context: Tensor, names: Tensor, images: Tensor | None) -> Tensor:
        return context + self.u @ self.v
