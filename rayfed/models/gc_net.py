"""GC-Net: computes an offset of the prompts for each image from the image's features without prompts.

Cheng et al., FedGCR, AAAI 2024 [cheng2024fedgcr], section 3.1.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

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
        return prompt + h[scrambled(len(h), len(prompt), h.device)]


def scrambled(batch: int, num_prompts: int, device: torch.device | str = "cpu") -> Tensor:
    """Index of the sample whose h each prompt gets under `scramble`, shape (B, P)."""
    return torch.arange(batch * num_prompts, device=device).view(batch, num_prompts) % batch
