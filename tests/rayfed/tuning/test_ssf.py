"""SSF: the equation for layers with vectors and with images, the number of parameters, an unchanged start."""

import pytest
import torch
from torch import nn

from rayfed.errors import ConfigError
from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from rayfed.tuning.base import apply_tuning, trainable
from rayfed.tuning.ssf import ScaleShift, _add_pair
from tests.rayfed.models.small import NETS, images, small


@torch.no_grad()
def test_the_equation_by_hand():
    """W x = (1*3, 2*3) = (3, 6); gamma * (3, 6) + beta = (2*3 + 1, -1*6 + 0.5) = (7, -5.5)."""
    layer = nn.Linear(1, 2, bias=False)
    layer.weight.copy_(torch.tensor([[1.0], [2.0]]))
    _add_pair(layer)
    layer.scale.copy_(torch.tensor([2.0, -1.0]))
    layer.shift.copy_(torch.tensor([1.0, 0.5]))
    assert layer(torch.tensor([3.0])).tolist() == [7.0, -5.5]


@torch.no_grad()
def test_a_convolution_is_scaled_by_channel():
    layer = nn.Conv2d(1, 2, 1, bias=False)
    layer.weight.copy_(torch.tensor([1.0, 10.0]).view(2, 1, 1, 1))
    _add_pair(layer)
    layer.scale[1], layer.shift[1] = 3.0, 0.25
    out = layer(torch.tensor([[1.0, 2.0], [3.0, 4.0]])[None])
    assert out.tolist() == [[[1.0, 2.0], [3.0, 4.0]], [[30.25, 60.25], [90.25, 120.25]]]


@torch.no_grad()
@pytest.mark.parametrize("kind", NETS)
def test_the_start_leaves_outputs_unchanged_to_the_bit(kind):
    tuned = apply_tuning(small(kind), ScaleShift(), 0).eval()
    assert torch.equal(tuned(images()), small(kind).eval()(images()))


@pytest.mark.parametrize("kind", NETS)
def test_every_vector_gets_a_gradient(kind):
    model = apply_tuning(small(kind), ScaleShift(), 0)
    nn.functional.cross_entropy(model(images(4)), torch.tensor([0, 1, 2, 3])).backward()
    assert [n for n, p in trainable(model).items() if p.grad is None] == []


def test_the_number_of_parameters_of_vit_b_is_that_of_the_paper():
    """Two vectors for norms (768, 768), qkv (2304), projection (768) and MLP (3072, 768) of 12 blocks, for
    patches and last norm: 0.21 million; with a head of 100 classes the paper has 0.28 million."""
    with torch.device("meta"):
        model = build_backbone(ModelConfig(name="vit_base_patch16_224"), 100, 0)
        apply_tuning(model, ScaleShift(), 0)
    expected = 2 * (12 * (768 + 2304 + 768 + 768 + 3072 + 768) + 768 + 768)
    assert expected == 205_824
    assert sum(p.numel() for p in trainable(model).values()) == expected + 76_900


def test_a_network_without_such_layers_is_refused():
    model = build_backbone(ModelConfig(name="char_lstm", pretrained=False, options={"hidden": 8}), 5, 0)
    with pytest.raises(ConfigError, match=r"tuning.name: 'char_lstm' has no linear layer, convol"):
        apply_tuning(model, ScaleShift(), 0)
