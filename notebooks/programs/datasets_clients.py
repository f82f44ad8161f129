"""A set of the library `datasets`, whose column `writer` names the clients."""

import numpy as np
from datasets import Dataset
from torch import nn

import rayfed

rng = np.random.default_rng(0)
digits = rng.integers(0, 4, 200)
rows = {
    "pixels": [rng.normal(digit, 1, 16).tolist() for digit in digits],
    "digit": digits,
    "writer": [f"w{number}" for number in rng.integers(0, 5, 200)],
}
experiment = rayfed.Experiment(
    model=nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)),
    data=Dataset.from_dict(rows),
    columns={"client": "writer", "input": "pixels", "target": "digit"},
    tuning="full",
    rounds=2,
)
