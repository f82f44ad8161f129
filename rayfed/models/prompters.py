"""Modules that compute the learned vectors of class prompts, which a tuning scheme puts on a text side.

Each maps (context, names, images) to vectors in a form that `TextSide` accepts: the trained vectors
`TextSide.context`; features of the class prompts by the frozen tower, shape (C, width); and features of the
images that are scored, or None. Letters in shapes: C classes, M vectors, W size of a token's embedding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.errors import ConfigError


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


class SecondContext(nn.Module):
    """Gives each class two prompts: one with the context, shape (M, W), and one with vectors of its own.

    Attributes:
        own: Vectors of the second prompt, shape (M, W).
    """

    def __init__(self, length: int, width: int, init_std: float) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.empty(length, width))
        nn.init.normal_(self.own, std=init_std)

    def forward(self, context: Tensor, names: Tensor, images: Tensor | None) -> Tensor:
        """Vectors of both prompts, shape (2, 1, M, W)."""
        _given(images)
        return torch.stack((context, self.own))[:, None]


class ImageToken(nn.Module):
    """CoCoOp's Meta-Net: a vector computed from the features of an image is added to its context, (M, W).

    Args:
        width: Number of image features.
        hidden: Width of the hidden layer.
        token_width: Size W of a token's embedding.
    """

    def __init__(self, width: int, hidden: int, token_width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, hidden)
        self.outer = nn.Linear(hidden, token_width)

    def forward(self, context: Tensor, names: Tensor, images: Tensor | None) -> Tensor:
        """Vectors of the prompts of each image, shape (B, 1, M, W)."""
        token = self.outer(torch.relu(self.inner(F.normalize(_given(images), dim=-1))))  # (B, W)
        return (context + token[:, None])[:, None]


class PromptNetwork(nn.Module):
    """Queries, which are the context of shape (M, W), attend to the names; a network follows.

    Args:
        names_width: Width of the features of class names.
        width: Size W of a token's embedding.
        heads: Heads of the attention; a divisor of W.
    """

    def __init__(self, names_width: int, width: int, heads: int) -> None:
        super().__init__()
        self.query_norm = nn.LayerNorm(width)
        self.name_norm = nn.LayerNorm(names_width)
        self.attention = nn.MultiheadAttention(width, heads, kdim=names_width, vdim=names_width)
        self.network = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, context: Tensor, names: Tensor, images: Tensor | None) -> Tensor:
        """Vectors of the prompts of all classes, shape (M, W)."""
        names = self.name_norm(names)
        attended, _ = self.attention(self.query_norm(context), names, names, need_weights=False)
        x = context + attended
        return x + self.network(x)


def _given(images: Tensor | None) -> Tensor:
    """The features of images, for prompts that not every method can use: some want one for each class.

    Raises:
        ConfigError: There are no images.
    """
    if images is None:
        raise ConfigError(
            "tuning.name: this method compares the features of the class prompts themselves, but this tuning "
            "has several for each class, or others for each image; set tuning=text_prompt"
        )
    return images
