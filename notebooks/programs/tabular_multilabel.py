"""Several labels of each row of a table, with the area under the ROC curve over the rows of a client."""

import numpy as np
from torch import nn

import rayfed

rng = np.random.default_rng(0)


def bank(shift):
    rows = rng.normal(shift, 1, (60, 10)).astype(np.float32)
    return rows, rows[:, :3] + rows[:, 3:6] > shift


experiment = rayfed.Experiment(
    model=nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3)),
    data={f"bank {i}": bank(i / 2) for i in range(4)},
    task="multilabel",
    tuning="full",
    rounds=2,
)
