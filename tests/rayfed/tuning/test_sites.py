"""Which layers of a block a scheme can work on: those that a forward pass calls."""

import pytest
import torch
from torch import nn

from rayfed.errors import ConfigError
from rayfed.tuning.base import apply_tuning, trainable
from rayfed.tuning.ia3 import IA3
from rayfed.tuning.lora import Lora
from rayfed.tuning.sites import LAST, called_layers, chosen_layers
from rayfed.tuning.ssf import ScaleShift
from tests.rayfed.models.small import NETS, images, small


@pytest.mark.parametrize("kind", NETS)
def test_the_layers_found_are_those_that_a_forward_pass_calls(kind):
    net = small(kind).eval().net
    seen = set()
    for module in net.modules():
        module.register_forward_hook(lambda layer, *_: seen.add(layer))
    with torch.no_grad():
        net(images())
    kinds = (nn.Linear, nn.Conv2d, nn.LayerNorm)
    assert set(called_layers(net, kinds).values()) == {m for m in seen if isinstance(m, kinds)}


def test_layers_inside_the_attention_of_pytorch_are_left_out():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    assert set(called_layers(layer, nn.Linear)) == {"linear1", "linear2"}


def test_the_joint_layer_of_beit_is_refused_by_name_and_left_out_otherwise():
    with pytest.raises(ConfigError, match=r"'attn.qkv' matches no linear layer.*attn.proj"):
        apply_tuning(small("beit"), Lora(sites=("attn.qkv",)), 0)
    assert not any("qkv" in name for name in trainable(apply_tuning(small("beit"), IA3(), 0)))
    assert not any("qkv" in name for name in trainable(apply_tuning(small("beit"), ScaleShift(), 0)))


def test_groups_and_expressions_choose_layers():
    model = small("vit")
    assert chosen_layers(model, ("l1", r"attn\.(qkv|proj)"), LAST) == ["attn.proj", "attn.qkv", "mlp.fc2"]
    with pytest.raises(ConfigError, match=r"tuning.sites: is empty; choose l0, l1 or from: attn.qkv"):
        chosen_layers(model, (), LAST)
