"""GC-Net: makes prompts that depend on the image, from its features without prompts."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

PromptMix: TypeAlias = Literal["own", "scramble"]


class GCNet(nn.Module):
    """Two linear layers with a ReLU between them.

    Attributes:
        mix: Whose output is added to the prompts of a sample: see `prompts`.
        dropout: On the features before the head.
    """

    def __init__(self, width: int, hidden: int, mix: PromptMix = "own", dropout: float = 0.0) -> None:
        super().__init__()
        self.mix = mix
        self.inner = nn.Linear(width, hidden)
        self.outer = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor) -> Tensor:
        """Features without prompts, shape (B, D), to h, shape (B, D)."""
        return self.outer(torch.relu(self.inner(features)))

    def prompts(self, prompt: Tensor | None, h: Tensor) -> Tensor:
        """Prompts of each sample: p_j + h, shape (B, P, D).

        With `scramble`, in training, prompt j of sample b gets h of sample (P b + j) mod B, as in the FedGCR
        authors' code, which tiles the batch and reads it back in another order. They test one image at a
        time, which is right again, so evaluation never mixes.

        Args:
            prompt: Shape (P, D).
            h: Shape (B, D).
        """
        assert prompt is not None
        if self.mix == "own" or not self.training:
            return prompt + h[:, None, :]
        return prompt + h[scrambled(len(h), len(prompt), h.device)]


def scrambled(batch: int, num_prompts: int, device: torch.device | str = "cpu") -> Tensor:
    """Source samples of the authors' mix, shape (B, P)."""
    return torch.arange(batch * num_prompts, device=device).view(batch, num_prompts) % batch
