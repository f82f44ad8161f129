"""Bottleneck adapters: the equation, their places, their number, and an unchanged start."""

import pytest
import torch

from rayfed.errors import ConfigError
from rayfed.tuning.adapter import Adapter, Bottleneck
from rayfed.tuning.base import apply_tuning, trainable
from tests.rayfed.models.small import TRANSFORMERS, images, small
from tests.rounding import near


@torch.no_grad()
def test_the_equation_by_hand():
    """W_down h + b = 1*2 + 2*3 - 7 = 1; GELU(1) = 0.8413447; times (2, -1), plus (0, 10), plus h = (2, 3)."""
    adapter = Bottleneck(2, 1, 0.0)
    adapter.down.weight.copy_(torch.tensor([[1.0, 2.0]]))
    adapter.down.bias.fill_(-7.0)
    adapter.up.weight.copy_(torch.tensor([[2.0], [-1.0]]))
    adapter.up.bias.copy_(torch.tensor([0.0, 10.0]))
    near(adapter(torch.tensor([2.0, 3.0])), torch.tensor([3.6826895, 12.1586553]), 5)


@torch.no_grad()
@pytest.mark.parametrize("style", ["houlsby", "pfeiffer"])
@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_the_start_leaves_outputs_unchanged_to_the_bit(kind, style):
    tuned = apply_tuning(small(kind), Adapter(style=style), 0).eval()
    assert torch.equal(tuned(images()), small(kind).eval()(images()))


def test_an_adapter_changes_the_output_of_its_layer():
    model = apply_tuning(small("vit"), Adapter(bottleneck=3, style="pfeiffer", train_head=False), 0).eval()
    assert {n.split(".", 2)[2] for n in trainable(model)} == {
        f"mlp.fc2.adapter.{part}.{leaf}" for part in ("down", "up") for leaf in ("weight", "bias")
    }
    layer = model.stack.get_submodule("2").mlp.fc2
    torch.nn.init.ones_(layer.adapter.up.bias)
    x = torch.rand(2, layer.in_features)
    plain = torch.nn.functional.linear(x, layer.weight, layer.bias)
    near(layer(x), plain + 1, layer.in_features + 2)


def test_the_number_of_parameters():
    """Width 32, four blocks: two adapters of 2 * 32 * 5 + 5 + 32 = 357 numbers in each."""
    model = apply_tuning(small("vit"), Adapter(bottleneck=5, train_head=False), 0)
    assert sum(p.numel() for p in trainable(model).values()) == 4 * 2 * 357
    weight = trainable(model)["blocks.1.attn.proj.adapter.down.weight"]
    assert 0.005 < weight.std() < 0.015


def test_a_network_without_blocks_is_refused():
    with pytest.raises(ConfigError, match="'resnet10t' has no uniform blocks"):
        apply_tuning(small("resnet"), Adapter(), 0)
