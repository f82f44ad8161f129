"""A small U-Net of one's own, with masks as targets."""

import numpy as np
import torch
from torch import nn

import rayfed

rng = np.random.default_rng(0)
masks = {f"site {i}": (rng.random((20, 16, 16)) < 0.2 + i / 10).astype(np.int64) for i in range(3)}
data = {name: (y[:, None] + rng.normal(0, 0.3, y[:, None].shape), y) for name, y in masks.items()}


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(1, 8, 3, 2, 1), nn.ConvTranspose2d(8, 8, 2, 2)
        self.last = nn.Conv2d(9, 2, 1)

    def forward(self, x):
        return self.last(torch.cat([x, self.up(self.down(x).relu())], dim=1))


experiment = rayfed.Experiment(model=UNet(), data=data, task="segmentation", tuning="full", rounds=2)
