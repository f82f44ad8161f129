"""The network of the Shakespeare experiments: embedded characters, two LSTM layers, the last hidden state.

McMahan et al., AISTATS 2017, and LEAF: embeddings of size 8, 2 layers; 256 hidden units as in the code of
q-FFL, which FFT-GP follows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rayfed.data.text import SYMBOLS


class CharLSTM(nn.Module):
    """Maps symbols (B, length) to the last hidden state (B, hidden).

    The forget gates start with a bias of 1, the default of TensorFlow, which the authors' code uses.
    """

    def __init__(self, embedding: int = 8, hidden: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.width = hidden
        self.embedding = nn.Embedding(SYMBOLS, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        with torch.no_grad():
            for layer in range(layers):
                # PyTorch adds two biases, in the order input, forget, cell, output.
                getattr(self.lstm, f"bias_ih_l{layer}")[hidden : 2 * hidden] = 1
                getattr(self.lstm, f"bias_hh_l{layer}")[hidden : 2 * hidden] = 0

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(x))
        return states[:, -1]
