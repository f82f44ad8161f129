"""(IA)3: the equation for keys and values and for hidden activations, the places, and an unchanged start."""

import pytest
import torch

from rayfed.errors import ConfigError
from rayfed.tuning.base import apply_tuning, trainable
from rayfed.tuning.ia3 import IA3
from tests.rayfed.models.small import TRANSFORMERS, images, small
from tests.rounding import near


@torch.no_grad()
def test_the_equations_by_hand():
    """Output of qkv: l * (W x + b). Input of fc2: W (l * x) + b; with W = 1/128 and l = 3, x = 2: 6 + b."""
    model = apply_tuning(small("vit"), IA3(), 0).eval()
    block = model.stack.get_submodule("1")
    vectors = {name: p for name, p in trainable(model).items() if name.startswith("blocks.1.")}
    assert set(vectors) == {"blocks.1.attn.qkv.ia3_l", "blocks.1.mlp.fc2.ia3_l"}
    vectors["blocks.1.attn.qkv.ia3_l"].copy_(torch.arange(96.0)[:, None])
    x = torch.rand(2, 32)
    base = block.attn.qkv.base_layer
    plain = torch.nn.functional.linear(x, base.weight, base.bias)
    near(block.attn.qkv(x), torch.arange(96.0) * plain, 32 + 2)
    vectors["blocks.1.mlp.fc2.ia3_l"].fill_(3.0)
    last = block.mlp.fc2.base_layer
    last.weight.fill_(1 / 128)
    near(block.mlp.fc2(torch.full((1, 128), 2.0)), 6 + last.bias[None], 128 + 2)


@torch.no_grad()
@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_the_start_leaves_outputs_unchanged_to_the_bit(kind):
    tuned = apply_tuning(small(kind), IA3(), 0).eval()
    assert torch.equal(tuned(images()), small(kind).eval()(images()))


@pytest.mark.parametrize(
    ("kind", "sites", "expected"),
    [
        ("vit", ("attention", "mlp"), {"attn.qkv", "mlp.fc2"}),
        ("vit", ("mlp",), {"mlp.fc2"}),
        ("vit", (r"attn\.proj",), {"attn.proj"}),
        ("mixer", ("attention", "mlp"), {"mlp_tokens.fc2", "mlp_channels.fc2"}),
    ],
)
def test_sites(kind, sites, expected):
    model = apply_tuning(small(kind), IA3(sites=sites, train_head=False), 0)
    assert {n.split(".", 2)[2] for n in trainable(model)} == {f"{layer}.ia3_l" for layer in expected}


def test_the_number_of_parameters():
    """Width 32, four blocks: 3 * 32 for queries, keys and values and 4 * 32 for the hidden activations."""
    model = apply_tuning(small("vit"), IA3(train_head=False), 0)
    assert sum(p.numel() for p in trainable(model).values()) == 4 * (96 + 128)


@pytest.mark.parametrize(
    ("kind", "tuning", "message"),
    [
        ("resnet", IA3(), "'resnet10t' has no uniform blocks"),
        ("mixer", IA3(sites=("attention",)), r"\['attention'\] match no linear layer.*choose attention, mlp"),
        ("vit", IA3(sites=("attn.k",)), "'attn.k' matches no linear layer"),
    ],
)
def test_it_says_why_it_does_not_fit(kind, tuning, message):
    with pytest.raises(ConfigError, match=message):
        apply_tuning(small(kind), tuning, 0)
