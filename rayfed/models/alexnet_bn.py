"""AlexNet with BatchNorm: the baseline that FedCLIP's tables train from random weights.

Krizhevsky, One Weird Trick for Parallelizing Convolutional Neural Networks, 2014, with a BatchNorm layer
after every convolution and after the first two linear layers and without dropout (Li et al., FedBN, ICLR
2021).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 4096
CONVOLUTIONS = ((64, 11, 4, 2), (192, 5, 1, 2), (384, 3, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1))
"""Output channels, kernel size, stride and padding of each convolution."""

POOLED = (0, 1, 4)
"""Indices of the convolutions that are followed by a pooling layer."""


class SingleNorm(nn.BatchNorm1d):
    """BatchNorm that normalises a batch of one image with its running statistics, as in evaluation.

    One image has no variance, so PyTorch's own layer raises an error in training.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) == 1:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(x)


class AlexNetBN(nn.Module):
    """Maps images (B, 3, size, size), size >= 63, to features (B, 4096)."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for i, (channels, kernel, stride, padding) in enumerate(CONVOLUTIONS):
            layers += [
                nn.Conv2d(before, channels, kernel, stride, padding),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
            ]
            layers += [nn.MaxPool2d(3, 2)] if i in POOLED else []
            before = channels
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(6)
        self.hidden = nn.Sequential(
            *(nn.Linear(36 * before, WIDTH), SingleNorm(WIDTH), nn.ReLU()),
            *(nn.Linear(WIDTH, WIDTH), SingleNorm(WIDTH), nn.ReLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.hidden(torch.flatten(self.pool(self.features(x)), 1))
        return features
