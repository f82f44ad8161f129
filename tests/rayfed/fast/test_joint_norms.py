"""Blocks that add, normalise and cast at once have the values of timm's."""

from contextlib import nullcontext

import pytest
import torch
from timm.models.vision_transformer import Block
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from rayfed.fast.joint_norms import JointNormBlock, use_joint_norms
from rayfed.models.attention import use_direct_attention
from tests.pretended import TYPE, pretended
from tests.pretended_autocast import mixed_precision


def block():
    torch.manual_seed(0)
    made = Block(24, 3).requires_grad_(False)
    for norm in (made.norm1, made.norm2):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    made.attn.proj.weight.requires_grad_()
    use_direct_attention(made)
    return made


def results(joint, second):
    """Output and gradients of a block in mixed precision on the pretended device, and its launches."""
    made = block()
    if joint:
        use_joint_norms(nn.Sequential(made))
        assert type(made) is JointNormBlock
    rng = torch.Generator().manual_seed(1)
    x, weights = torch.randn(2, 5, 24, generator=rng), torch.randn(2, 5, 24, generator=rng)
    exact = sdpa_kernel(SDPBackend.MATH) if second else nullcontext()  # the only one with second derivatives
    with pretended() as device, mixed_precision(), exact:
        made = made.to(device.name)
        x = x.to(device.name).requires_grad_()
        weights = weights.to(device.name)
        device.counts.clear()
        with torch.autocast(TYPE, torch.bfloat16):
            y = made(x)
        assert y.dtype == torch.float32
        leaves = [x, made.attn.proj.weight]
        found = torch.autograd.grad((y * weights).sum(), leaves, create_graph=second)
        launches = device.counts.kernels
        if second:
            found += torch.autograd.grad(sum(g.float().square().sum() for g in found), leaves)
        return [value.detach().inner for value in (y, *found)], launches


@pytest.mark.parametrize("second", [False, True])
def test_the_values_are_those_of_timm(second):
    ours, launches = results(True, second)
    timms, others = results(False, second)
    assert all(map(torch.equal, ours[:2], timms[:2]))
    for mine, wanted in zip(ours, timms, strict=True):
        assert (mine - wanted).norm() <= 2**-8 * wanted.norm()  # of bfloat16
    if not second:
        assert launches == others - 8


def test_a_block_in_float32_or_with_a_trained_or_watched_norm_is_timms():
    made = block()
    made.norm1.weight.requires_grad_()
    use_joint_norms(nn.Sequential(made))
    assert type(made) is Block
    watched = block()
    watched.norm2.register_forward_hook(lambda *_: None)
    scaled = Block(24, 3, init_values=0.1).requires_grad_(False)
    use_joint_norms(nn.Sequential(watched, scaled))
    assert type(watched) is type(scaled) is Block
    plain = block()
    x = torch.randn(2, 5, 24)
    wanted = plain(x)
    use_joint_norms(nn.Sequential(plain))
    assert torch.equal(plain(x), wanted)
