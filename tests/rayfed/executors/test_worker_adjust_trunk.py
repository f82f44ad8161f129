"""What a device changes in a network."""

import pytest
import torch
from torch import nn

from rayfed.executors.worker import adjust_trunk
from rayfed.federation.train_config import TrainConfig
from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from tests.pretended import TYPE

CHANNELS_LAST = torch.channels_last


def weights_of_convolutions(model):
    return [
        each.weight for each in model.modules() if isinstance(each, nn.Conv2d) and each.kernel_size != (1, 1)
    ]


@pytest.mark.parametrize(("device", "changes"), [(TYPE, True), ("cpu", False)])
def test_convolutions_have_the_layout_of_tensor_cores_on_a_device(device, changes):
    model = build_backbone(ModelConfig(name="test_resnet", pretrained=False, size=64), 3, 0)
    before = [weight.detach().clone() for weight in weights_of_convolutions(model)]
    adjust_trunk(model, TrainConfig(), device)
    after = weights_of_convolutions(model)
    assert after
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert all(weight.is_contiguous(memory_format=CHANNELS_LAST) == changes for weight in after)
