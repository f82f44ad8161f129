"""Adaptive pooling on a device: the values of torch's kernel, and a backward pass that is not refused."""

import pytest
import torch
from torch import nn

from rayfed.devices import set_deterministic
from rayfed.executors.worker import adjust_trunk
from rayfed.federation.train_config import TrainConfig
from rayfed.models.backbone import Backbone
from rayfed.models.trunk import MeanPool
from tests.pretended import TYPE, pretended
from tests.rounding import near


@pytest.mark.parametrize("size", [(6, 6), (7, 13), (3, 12)])
@pytest.mark.parametrize("wanted", [6, (2, 5), (None, 3)])
def test_means_of_windows_are_those_of_torch(size, wanted):
    image = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    known, weight = image.clone().requires_grad_(), torch.randn(2, 3, 1, 1)
    expected = nn.AdaptiveAvgPool2d(wanted)(known)
    (expected * weight).sum().backward()
    model = Backbone(nn.Sequential(nn.AdaptiveAvgPool2d(wanted)), nn.Linear(3, 2))
    adjust_trunk(model, TrainConfig(), TYPE)
    with pretended() as device:
        set_deterministic(torch.device(device.name), "auto")
        there = image.to(device.name).requires_grad_()
        found = model.net(there)
        (found * weight.to(device.name)).sum().backward()
        near(found.cpu(), expected, 9 + 1, size=9.0)  # at most 9 numbers of size 1 are added
        near(there.grad.cpu(), known.grad, 9 + 1)


def test_the_cpu_keeps_the_kernel_of_torch():
    model = Backbone(nn.Sequential(nn.AdaptiveAvgPool2d(2)), nn.Linear(3, 2))
    adjust_trunk(model, TrainConfig(), "cpu")
    assert not any(isinstance(module, MeanPool) for module in model.modules())
