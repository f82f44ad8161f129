"""An LSTM on time series, with regression and the mean absolute error."""

import numpy as np
from torch import nn

import rayfed

rng = np.random.default_rng(0)
series = {f"sensor {i}": rng.normal(i / 4, 1, (40, 24, 2)).astype(np.float32) for i in range(4)}


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 16, batch_first=True)
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        return self.out(self.lstm(x)[0][:, -1])


data = {name: (x[:, :-1], x[:, -1, 0]) for name, x in series.items()}
experiment = rayfed.Experiment(model=Forecast, data=data, task="regression", tuning="full", rounds=2)
