"""Dropout by number: Philox, and masks that do not depend on who shares a pass."""

import pytest
import torch

from rayfed.fast import kernels

SEEDS = torch.tensor([2**62 + 12345, 77, 2**40 + 3])
SHAPE = torch.Size((6, 5, 19))

KNOWN = [
    (0, (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (-1, (0xFFFFFFFF,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        0x299F31D0_A4093822,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
"""Key, counter and numbers of Philox 4x32-10, in the known answers of its authors' library Random123."""


@pytest.mark.parametrize(("key", "counter", "numbers"), KNOWN)
def test_philox_gives_the_known_answers(key, counter, numbers):
    found = kernels.philox(torch.tensor(key), tuple(map(torch.tensor, counter)))
    assert " ".join(f"{int(number):08x}" for number in found) == numbers


def test_a_client_has_the_same_mask_alone_and_in_a_group_with_more_room():
    together = kernels.keep_mask(SHAPE, SEEDS, 3, 2, 0.4).chunk(3)
    for mine, seed in zip(together, SEEDS.split(1), strict=True):
        assert torch.equal(kernels.keep_mask(torch.Size((2, 5, 19)), seed, 3, 2, 0.4), mine)
        assert torch.equal(kernels.keep_mask(torch.Size((1, 5, 19)), seed, 3, 2, 0.4), mine[:1])
        assert torch.equal(kernels.keep_mask(torch.Size((2, 3, 19)), seed, 3, 2, 0.4), mine[:, :3])


def test_counts_of_a_graph_are_added_to_those_of_each_client():
    counts = torch.tensor([0, 2, 5])
    masks = kernels.keep_mask(SHAPE, SEEDS, 3, 2, 0.4, counts).chunk(3)
    for mask, seed, more in zip(masks, SEEDS.split(1), counts.tolist(), strict=True):
        assert torch.equal(mask, kernels.keep_mask(torch.Size((2, 5, 19)), seed, 3, 2 + more, 0.4))


def test_every_client_layer_and_call_has_a_mask_of_its_own():
    masks = [
        kernels.keep_mask(torch.Size((4, 5, 64)), s, *n, 0.5)
        for s in SEEDS.split(1)
        for n in ((0, 0), (0, 1), (1, 0))
    ]
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert 500 < (mask == other).sum() < 780  # of 1280, six deviations around the half


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_as_many_elements_are_kept_as_the_probability_says(p):
    mask = kernels.keep_mask(torch.Size((100, 100, 50)), SEEDS[:1], 0, 0, p)
    deviation = (p * (1 - p) / mask.numel()) ** 0.5
    assert abs(mask.double().mean() - (1 - p)) < 5 * deviation
    rows = mask.double().mean((1, 2)) - (1 - p)
    assert rows.abs().max() < 6 * (p * (1 - p) / 5000) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_kept_is_scaled_and_rounded_once(dtype):
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = kernels.plain_dropout(x, SEEDS, 3, 2, 0.4)
    kept = kernels.keep_mask(SHAPE, SEEDS, 3, 2, 0.4)
    assert found.dtype == dtype
    assert torch.equal(found == 0, ~kept)
    wide = x if dtype == torch.float64 else x.float()
    assert torch.equal(found[kept], (wide * (1 / 0.6)).to(dtype)[kept])
    y = torch.ones(SHAPE, dtype=dtype)
    torch.ops.rayfed.dropout_add_(y, x, SEEDS, 3, 2, 0.4)
    assert torch.equal(y, 1 + found)
    assert torch.equal(torch.ops.rayfed.dropout(x, SEEDS, 3, 2, 0.4), found)


def test_a_norm_after_a_sum_has_the_gradients_of_autograd():
    rng = torch.Generator().manual_seed(0)
    x, branch = (torch.randn(3, 4, 24, generator=rng, requires_grad=True) for _ in range(2))
    weight, bias = torch.randn(24, generator=rng), torch.randn(24, generator=rng)
    through, grad = torch.randn(3, 4, 24, generator=rng), torch.randn(3, 4, 24, generator=rng)
    total = x + branch
    normed = torch.nn.functional.layer_norm(total, (24,), weight, bias, 1e-6)
    wanted = torch.autograd.grad([total, normed], [x, branch], [through, grad])
    mine, own, mean, rstd = torch.ops.rayfed.add_norm(
        x.detach(), branch.detach(), weight, bias, 1e-6, x.dtype
    )
    assert torch.equal(mine, total)
    assert torch.equal(own, normed)
    found = torch.ops.rayfed.add_norm_backward(grad, through, mine, mean, rstd, weight)
    assert all(map(torch.equal, found, wanted))
