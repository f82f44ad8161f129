"""Attention with fewer copies: the bits of timm's for long sequences, for short ones all but rounding."""

import subprocess
import sys
from copy import deepcopy
from inspect import signature

import pytest
import torch
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from rayfed.executors.worker import adjust_trunk
from rayfed.federation.train_config import TrainConfig
from rayfed.models import attention
from rayfed.models.attention import SHORT, DirectAttention, Products, use_direct_attention
from tests.rounding import equally_near

LONG = SHORT + 1


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
def test_outputs_and_gradients_have_the_same_bits(case, training):
    layer, quick = both(**CASES[case])
    x = torch.randn(5, LONG, 24)
    of_timm, own = (passed(each.train(training), x) for each in (layer, quick))
    assert all(torch.equal(a, b) for a, b in zip(of_timm, own, strict=True))
    assert of_timm[1].abs().sum() > 0


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tokens", [1, 17, SHORT])
def test_short_sequences_differ_by_rounding_only(tokens, case, training, monkeypatch):
    monkeypatch.setattr(attention, "PART", 3 * tokens * 24 * 2)  # two rows at a time, and one at last
    layer, quick = both(**CASES[case])
    x = torch.randn(5, tokens, 24)
    of_timm, own = (passed(each.train(training), x) for each in (layer, quick))
    equally_near(of_timm, own, passed(deepcopy(layer).double(), x.double()))


def calls(monkeypatch):
    """Shapes of what `Products` is called with."""
    found = []
    apply = Products.apply
    monkeypatch.setattr(Products, "apply", lambda qkv: found.append(tuple(qkv.shape)) or apply(qkv))
    return found


def test_products_are_used_for_short_sequences_where_nothing_else_is_asked_for(monkeypatch):
    found = calls(monkeypatch)
    short = torch.randn(2, SHORT, 24)
    _, quick = both()
    quick(short)
    with torch.no_grad():
        quick(short)
    assert found == [(2, SHORT, 3, 3, 8)] * 2
    quick(torch.randn(2, LONG, 24))
    quick.double()(short.double())
    with sdpa_kernel(SDPBackend.MATH):
        quick.float()(short)
    with torch.autocast("cpu", torch.bfloat16):
        quick(short)
    for case in {"normalised", "dropout", "gated"} & {*CASES}:
        both(**CASES[case])[1](short)
    assert len(found) == 2
    both(**CASES["dropout"])[1].eval()(short)
    assert len(found) == 3
    narrow = nn.Sequential(Attention(1, num_heads=1))  # its products depend on the number of rows
    use_direct_attention(narrow)
    narrow(torch.randn(2, SHORT, 1))
    for norm in ("q_norm", "k_norm"):
        _, one = both()
        setattr(one, norm, nn.LayerNorm(8))
        one(short)
    assert len(found) == 3


def test_second_derivatives_exist_where_they_do_in_torch():
    _, quick = both()
    x = torch.randn(2, 6, 24, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        (first,) = torch.autograd.grad(quick(x).sin().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
    assert second.abs().sum() > 0
    with pytest.raises(RuntimeError, match=r"no second derivatives.*sdpa_kernel"):
        torch.autograd.grad(quick(x).sin().sum(), x, create_graph=True)


@pytest.mark.parametrize(("heads", "width"), [(1, 2), (1, 16), (3, 8), (4, 16), (3, 64)])
@pytest.mark.parametrize("tokens", [1, 2, 5, 17, SHORT])
@pytest.mark.usefixtures("one_thread")
def test_the_result_of_a_row_does_not_depend_on_the_other_rows(tokens, heads, width):
    """Neither on how many there are, nor on how they are divided into parts."""
    torch.manual_seed(0)
    rows = max(3, 2 * attention.PART // (3 * tokens * heads * width) + 3) if tokens > 5 else 40
    whole = torch.randn(rows, tokens, 3, heads, width, requires_grad=True)
    given = torch.randn(rows, tokens, heads * width)
    output = Products.apply(whole)
    (grad,) = torch.autograd.grad(output, whole, given)
    for start, end in ((0, 1), (rows - 1, rows), (1, 3), (rows // 2, rows)):
        part = whole[start:end].detach().requires_grad_()
        own = Products.apply(part)
        assert torch.equal(own, output[start:end])
        assert torch.equal(torch.autograd.grad(own, part, given[start:end])[0], grad[start:end])


def test_masks_are_respected():
    layer, quick = both()
    x = torch.randn(2, LONG, 24)
    mask = torch.zeros(LONG, LONG).masked_fill(torch.ones(LONG, LONG).triu(1).bool(), -torch.inf)
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


class Copies(TorchDispatchMode):
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
        output = layer(torch.randn(2, LONG, 24)).sum()
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
