"""A transformer of one's own, of whose four blocks clients hold four, two and one, with FedRA."""

import numpy as np
from torch import nn

import rayfed

rng = np.random.default_rng(0)
texts = {f"phone {i}": rng.integers(0, 20, (40, 12)) for i in range(3)}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(20, 16), nn.Linear(16, 4)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 4)

    def forward(self, x):
        return self.out(self.encoder(self.words(x)).mean(1))


model = rayfed.Model(Encoder, head="out", blocks="encoder.layers")
data = {name: (x, x.max(1) % 4) for name, x in texts.items()}
experiment = rayfed.Experiment(method="fedra", model=model, data=data, capacity=[4, 2, 1], tuning="lora")
