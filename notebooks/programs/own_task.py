"""A task of one's own: the 0.9 quantile of the waiting time, by the pinball loss."""

import numpy as np
import torch
from torch import nn

import rayfed

rng = np.random.default_rng(0)


def hospital(busy):
    patients = rng.normal(0, 1, (60, 5)).astype(np.float32)
    return patients, rng.gamma(2, busy + patients[:, :1] ** 2).astype(np.float32)


def pinball(output, target):
    return torch.maximum(0.9 * (target - output), 0.1 * (output - target)).squeeze(1)


task = rayfed.Task(loss=pinball, metrics={"pinball": pinball}, smaller=("pinball",))
net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
data = {f"hospital {i}": hospital(1 + i) for i in range(4)}
experiment = rayfed.Experiment(model=net, data=data, task=task, tuning="full", rounds=2)
