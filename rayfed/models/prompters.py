"""Modules that compute the learned vectors of class prompts, which a tuning scheme puts on a text side.

Each maps (context, names, images) to vectors in a form that `TextSide` accepts: the trained vectors
`TextSide.context`; features of the class prompts by the frozen tower, shape (C, width); and features of the
images that are scored, or None. Letters in shapes: C classes, M vectors, W size of a token's embedding.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

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
    """Gives each class two prompts: one with the context, shape (M, W), and one with its own vectors.

    Attributes:
        own: Vectors of the second prompt, shape (M, W).
    """

    def __init__(self, length: int, width: int, init_std: float) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.empty(length, width))
        nn.init.normal_(self.own, std=init_std)

    def forward(self, context: Tensor, names: Tensor, images: Tensor | None) -> Tensor:
        """Vectors of both prompts, shape (2, 1, M, W)."""
        _require_images(images)
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
        token = self.outer(torch.relu(self.inner(F.normalize(_require_images(images), dim=-1))))  # (B, W)
        return (context + token[:, None])[:, None]


class PromptNetwork(nn.Module):
    """FedTPG's network: queries, which are the context of shape (M, W), attend to the names of the classes.

    With the normalized queries Q and names N it computes X = MultiHead(Q, N, N), to which the queries are not
    added, and X + Linear(GEGLU(Linear(LayerNorm(X)))).

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
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 8 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, context: Tensor, names: Tensor, images: Tensor | None) -> Tensor:
        """Vectors of the prompts of all classes, shape (M, W)."""
        names = self.name_norm(F.normalize(names, dim=-1))
        attended, _ = self.attention(self.query_norm(context), names, names, need_weights=False)
        values, gates = self.inner(self.norm(attended)).chunk(2, dim=-1)  # GEGLU
        return attended + self.outer(values * F.gelu(gates))


def _require_images(images: Tensor | None) -> Tensor:
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


PromptMix: TypeAlias = Literal["own", "scramble"]


class GCNet(nn.Module):
    """Two linear layers with a ReLU between them.

    Attributes:
        mix: `own` adds a sample's own output to its prompts, `scramble` that of other samples; see `prompts`.
        dropout: Dropout layer that is applied to the features before the head.
    """

    def __init__(self, width: int, hidden: int, mix: PromptMix = "own", dropout: float = 0.0) -> None:
        super().__init__()
        self.mix = mix
        self.inner = nn.Linear(width, hidden)
        self.outer = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor) -> Tensor:
        """Map features without prompts, shape (B, D), to offsets h, shape (B, D)."""
        return self.outer(torch.relu(self.inner(features)))

    def prompts(self, prompt: Tensor | None, h: Tensor) -> Tensor:
        """Prompts of each sample: p_j + h, shape (B, P, D).

        With `scramble`, in training, prompt j of sample b gets h of sample (P b + j) mod B, as in the FedGCR
        authors' code, which repeats the batch along another axis than it reads. Their evaluation uses batches
        of one image, in which every prompt gets the image's own h, so evaluation here never mixes samples.

        Args:
            prompt: Prompts p, shape (P, D).
            h: Output of `forward`, shape (B, D).
        """
        assert prompt is not None
        if self.mix == "own" or not self.training:
            return prompt + h[:, None, :]
        return prompt + h[scramble_index(len(h), len(prompt), h.device)]


def scramble_index(batch: int, num_prompts: int, device: torch.device | str = "cpu") -> Tensor:
    """Index of the sample whose h each prompt gets under `scramble`, shape (B, P)."""
    return torch.arange(batch * num_prompts, device=device).view(batch, num_prompts) % batch
