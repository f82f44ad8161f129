"""A small network as a user has one, whose subclasses do something besides."""

import torch
from torch import nn


class Own(nn.Module):
    """Two linear layers, between which subclasses do something."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.o = nn.Linear(6, 8), nn.Linear(8, 3)
        self.add()

    def add(self):
        """Add what else the network has."""

    def middle(self, h):
        return h

    def forward(self, x):
        return self.o(self.middle(torch.relu(self.a(x))))
