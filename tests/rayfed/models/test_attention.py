"""Attention with fewer copies has the bits of timm's."""

import subprocess
import sys
from copy import deepcopy
from inspect import signature

import pytest
import torch
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from rayfed.executors.worker import adjust_trunk
from rayfed.federation.train_config import TrainConfig
from rayfed.models.attention import DirectAttention, use_direct_attention
from tests.pretended import Mode


def both(**options):
    """timm's layer, and the same one as a client actor computes it."""
    torch.manual_seed(0)
    layer = Attention(24, num_heads=3, **options)
    quick = nn.Sequential(deepcopy(layer))
    use_direct_attention(quick)
    assert type(quick[0]) is DirectAttention
    return layer, quick[0]


def passed(layer, x, **options):
    """Output, gradient of the input, and gradients of the weights."""
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    output = layer(x, **options)
    weights = [p for p in layer.parameters() if p.requires_grad]
    grads = torch.autograd.grad(output.sin().sum(), [x, *weights])
    return [output, *grads]


CASES = {
    "plain": {},
    "without bias": {"qkv_bias": False},
    "normalised": {"qk_norm": True, "norm_layer": nn.LayerNorm},
    "output normalised": {"scale_norm": True, "norm_layer": nn.LayerNorm},
    "dropout": {"attn_drop": 0.3, "proj_drop": 0.3},
    **({"gated": {"gated": True}} if "gated" in signature(Attention).parameters else {}),
}
"""Ways of timm's layer; a gate is new in version 1.0.28."""


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tokens", [1, 17, 65])
def test_outputs_and_gradients_have_the_same_bits(tokens, case, training):
    layer, quick = both(**CASES[case])
    x = torch.randn(5, tokens, 24)
    of_timm, own = (passed(each.train(training), x) for each in (layer, quick))
    assert all(torch.equal(a, b) for a, b in zip(of_timm, own, strict=True))
    assert of_timm[1].abs().sum() > 0


def test_second_derivatives_exist_where_they_do_in_torch():
    _, quick = both()
    x = torch.randn(2, 6, 24, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        (first,) = torch.autograd.grad(quick(x).sin().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
    assert second.abs().sum() > 0


def test_masks_are_respected():
    layer, quick = both()
    x = torch.randn(2, 17, 24)
    mask = torch.zeros(17, 17).masked_fill(torch.ones(17, 17).triu(1).bool(), -torch.inf)
    free = quick(x)
    for options in ({"attn_mask": mask}, {"is_causal": True}):
        masked = quick(x, **options)
        assert torch.equal(masked, layer(x, **options))
        assert not torch.allclose(masked, free)
    assert torch.equal(quick(x, attn_mask=None, is_causal=False), free)


def test_a_layer_whose_steps_are_computed_one_by_one_stays_so():
    layer, quick = both()
    layer.fused_attn = quick.fused_attn = False
    x = torch.randn(2, 6, 24)
    assert torch.equal(quick(x), layer(x))


class Copies(Mode):
    """Counts the copies of whole tensors."""

    def __init__(self):
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found += func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten._reshape_copy)
        return func(*args, **(kwargs or {}))


def test_the_backward_pass_copies_once_less():
    found = []
    for layer in both():
        output = layer(torch.randn(2, 17, 24)).sum()
        with Copies() as copies:
            output.backward()
        found.append(copies.found)
    assert found[1] == found[0] - 1


@pytest.mark.parametrize("train", [TrainConfig(), TrainConfig(compile=True)], ids=["as it is", "compiled"])
def test_client_actors_use_it_unless_the_network_is_compiled(train, monkeypatch):
    monkeypatch.setattr("rayfed.executors.worker.use_compile", lambda model, device: None)
    net = VisionTransformer(img_size=16, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=2)
    adjust_trunk(net, train)
    kinds = {type(block.attn) for block in net.blocks}
    assert kinds == ({Attention} if train.compile else {DirectAttention})


@pytest.mark.slow
@pytest.mark.steady
def test_a_driver_and_the_actors_of_other_networks_do_not_import_timm():
    modules = "rayfed.engine.session, rayfed.executors.client_actor, rayfed.executors.worker"
    adjust = (
        "from rayfed.executors.worker import adjust_trunk; import torch, sys; "
        "from rayfed.federation.train_config import TrainConfig; "
        "adjust_trunk(torch.nn.Linear(2, 2), TrainConfig()); print('timm' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import {modules}; {adjust}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False"]
