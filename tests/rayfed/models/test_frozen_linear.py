"""Frozen linear layers: torch's own bits, whether or not oneDNN computes them."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rayfed.models import frozen_linear
from rayfed.models.frozen_linear import (
    LARGEST,
    REPEATS,
    ROWS,
    WIDEST,
    FrozenLinear,
    frozen_product,
    gives_same_bits,
    seconds_saved,
    use_onednn,
)
from tests.rounding import equally_near, exactly, near

SHAPES = [(64, 192), (64, 256), (256, 64), (64, 64), (576, 192), (33, 10)]


@pytest.fixture(autouse=True)
def _forget_trials():
    gives_same_bits.cache_clear()
    seconds_saved.cache_clear()
    yield
    gives_same_bits.cache_clear()
    seconds_saved.cache_clear()


@pytest.fixture
def quicker(monkeypatch):
    """oneDNN is the quicker one in every trial."""
    monkeypatch.setattr(frozen_linear, "seconds_saved", lambda *_: 1.0)


@pytest.fixture
def used(monkeypatch, quicker):
    """Shapes of the weights that oneDNN multiplied with; its product is torch's own here."""
    shapes = []

    def product(x, weight, bias):
        shapes.append(tuple(weight.shape))
        assert x.is_contiguous()
        return F.linear(x, weight, bias)

    monkeypatch.setattr(frozen_linear, "_onednn", product)
    return shapes


def layers(d_in, d_out, bias=True):
    """A layer of torch, and the same one after `use_onednn`."""
    torch.manual_seed(3)
    plain = nn.Linear(d_in, d_out, bias).requires_grad_(False)
    quick = nn.Sequential(nn.Linear(d_in, d_out, bias)).requires_grad_(False)
    quick[0].load_state_dict(plain.state_dict())
    use_onednn(quick)
    assert type(quick[0]) is FrozenLinear
    return plain, quick[0]


def images(d_in, rows=2 * ROWS, **options):
    return torch.randn(rows // 2, 2, d_in, requires_grad=True, **options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_have_the_bits_of_torch(shape, bias, quicker):
    plain, quick = layers(*shape, bias)
    for rows in (2, ROWS, 1000, 2176):
        x = images(shape[0], rows)
        expected, output = plain(x), quick(x)
        weights = torch.randn_like(output)
        assert torch.equal(output, expected)
        gradients = [torch.autograd.grad(y, x, weights)[0] for y in (expected, output)]
        assert torch.equal(*gradients)


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("back", [True, False])
def test_onednn_is_used_in_the_directions_in_which_its_bits_are_the_same(forward, back, used, monkeypatch):
    same = {(64, 192): forward, (192, 64): back}
    monkeypatch.setattr(frozen_linear, "gives_same_bits", lambda d_in, d_out, _: same[d_in, d_out])
    x = images(64)
    output = layers(64, 192)[1](x)
    assert used == [(192, 64)] * forward
    torch.autograd.grad(output.sum(), x)  # gradients of ones, which are not contiguous
    assert used[forward:] == [(64, 192)] * back


def test_trials_refuse_a_product_with_other_bits_and_torch_without_onednn(monkeypatch):
    monkeypatch.setattr(frozen_linear, "_onednn", F.linear)
    assert gives_same_bits(8, 20, 1)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not gives_same_bits(8, 21, 1)
    monkeypatch.undo()
    monkeypatch.setattr(frozen_linear, "_onednn", lambda x, w, b: F.linear(x, w, b).nextafter(x.max()))
    assert not gives_same_bits(8, 22, 1)


def test_torch_has_the_operator_and_it_multiplies():
    x, weight, bias = torch.randn(300, 24), torch.randn(32, 24), torch.randn(32)
    size = float((x.abs() @ weight.abs().mT + bias.abs()).max())
    near(frozen_linear._onednn(x, weight, bias), F.linear(x, weight, bias), 24 + 1, size)


def test_trained_layers_and_other_rows_are_computed_by_torch(used):
    assert gives_same_bits(64, 192, torch.get_num_threads())
    used.clear()
    _, quick = layers(64, 192)
    quick(images(64, ROWS - 2))
    quick.double()(images(64, dtype=torch.float64))
    quick.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert quick(images(64)).dtype == torch.bfloat16
    for trained in (quick.weight, quick.bias):
        trained.requires_grad_()
        quick(images(64)).sum().backward()
        assert trained.grad is not None
        trained.requires_grad_(False)
    assert not used


def test_a_result_can_be_changed_in_place_and_differentiated_twice(quicker):
    plain, quick = layers(64, 192)
    torch.manual_seed(4)
    x = images(64)

    def second(layer, x):
        output = layer(x).add_(1)
        (first,) = torch.autograd.grad(output.pow(3).mean(), x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), x)[0]

    found = second(plain, x)
    assert found.abs().max() > 0
    equally_near([found], [second(quick, x)], [exactly(second, plain, x)])


def test_wide_layers_are_not_compared(used):
    assert gives_same_bits(WIDEST, 8, 1)
    compared = len(used)
    assert not gives_same_bits(WIDEST + 1, 8, 1)
    assert not gives_same_bits(8, WIDEST + 1, 1)
    assert len(used) == compared


@pytest.mark.parametrize("saved", [-1.0, 0.0])
def test_a_product_that_saves_no_time_is_left_to_torch(saved, used, monkeypatch):
    monkeypatch.setattr(frozen_linear, "seconds_saved", lambda *_: saved)
    _, quick = layers(64, 192)
    threads = torch.get_num_threads()
    assert gives_same_bits(64, 192, threads)
    assert gives_same_bits(192, 64, threads)
    used.clear()
    quick(images(64)).sum().backward()
    frozen_product(images(64), quick.weight, quick.bias)
    assert not used


def test_trials_say_which_product_takes_less_time(monkeypatch):
    own, clock = F.linear, [0.0]
    monkeypatch.setattr(frozen_linear, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def slow(x, weight, bias=None):
        clock[0] += 0.01
        return own(x, weight, bias)

    monkeypatch.setattr(frozen_linear, "_onednn", slow)
    assert seconds_saved(16, 8, 64, True, True, 1) == pytest.approx(-0.01)
    monkeypatch.setattr(frozen_linear, "_onednn", own)
    monkeypatch.setattr(frozen_linear.F, "linear", slow)
    assert seconds_saved(16, 8, 64, True, False, 1) == pytest.approx(0.01)


def test_trials_have_the_layout_of_the_weight_and_no_more_rows_than_allowed(monkeypatch):
    seen = []
    monkeypatch.setattr(
        frozen_linear, "_onednn", lambda x, w, b: seen.append((len(x), w.stride(), b is None))
    )
    seconds_saved(1024, 512, 4096, False, False, 1)
    seconds_saved(64, 32, 512, True, True, 1)
    times = 1 + REPEATS
    assert seen == [(LARGEST // 2**19, (1, 512), True)] * times + [(512, (64, 1), False)] * times
