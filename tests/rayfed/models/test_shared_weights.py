import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rayfed.models.shared_weights import attach, checksum, dump, skeleton
from rayfed.tuning.base import apply_tuning, trainable
from rayfed.tuning.full import Full
from rayfed.tuning.head import Head
from rayfed.tuning.lora import Lora
from rayfed.tuning.visual_prompt import VisualPrompt
from tests.rayfed.models.small import images, small
from tests.rounding import near


def build(kind="vit", tuning=None, seed=0):
    return apply_tuning(small(kind, seed=seed), tuning or Lora(rank=2), seed)


def read_only(arrays, offset=0):
    """Bytes as Ray's object store hands them out: large arrays begin at a multiple of 64, small ones of 8."""
    out = {n: placed(a, offset) for n, a in arrays.items()}
    for array in out.values():
        array.flags.writeable = False
    return out


def placed(array, offset):
    """A copy that begins at a multiple of 64 bytes plus an offset."""
    room = np.empty(array.nbytes + 128, np.uint8)
    start = -address(room) % 64 + offset
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def attached(kind="vit", tuning=None):
    source = build(kind, tuning)
    arrays = read_only(dump(source))
    model = skeleton(lambda: build(kind, tuning, seed=1))
    assert all(p.is_meta for p in model.parameters())
    attach(model, arrays)
    return source, arrays, model


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize(
    ("kind", "tuning"),
    [
        ("vit", Lora(rank=2)),
        ("beit", Lora(rank=2)),
        ("mixer", Head()),
        ("vit", VisualPrompt()),
        ("resnet", Full()),
        ("resnet", Head()),
    ],
)
@torch.no_grad()
def test_only_frozen_parameters_are_shared(kind, tuning):
    source, arrays, model = attached(kind, tuning)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in source.parameters()]
    for name, p in model.named_parameters():
        assert (p.data_ptr() == address(arrays[name])) != p.requires_grad, name
    for name, b in model.named_buffers():
        assert b.data_ptr() != address(arrays[name]), name
    x = images()
    assert torch.equal(model.eval()(x), source.eval()(x))
    assert checksum(model) == checksum(source)


@torch.no_grad()
def test_weights_are_laid_out_alike_wherever_their_arrays_lie():
    """Also those of a network of a user, of which an array would not keep the strides on its way."""

    def build():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 5)).requires_grad_(False)
        net[2].weight = nn.Parameter(torch.rand(8, 5).T, requires_grad=False)
        return net.to(memory_format=torch.channels_last)

    arrays = dump(build())
    assert all(array.flags.c_contiguous for array in arrays.values())
    for offset in (0, 8):
        model = skeleton(build)
        attach(model, read_only(arrays, offset))
        for name, p in model.named_parameters():
            assert p.data_ptr() % 64 == 0, name
            assert p.is_contiguous(), name
            assert np.array_equal(p.numpy(), arrays[name]), name
            assert not p.requires_grad, name


def test_training_writes_nothing_to_the_shared_arrays():
    _, arrays, model = attached("vit", Lora(rank=2, dropout=0.5))
    before = {n: a.copy() for n, a in arrays.items()}
    start = {n: p.detach().clone() for n, p in trainable(model).items()}
    optimizer = torch.optim.AdamW(trainable(model).values(), lr=0.1, weight_decay=0.1)
    model.train()
    for _ in range(3):
        model.zero_grad()
        model(images()).square().sum().backward()
        optimizer.step()
    assert all(np.array_equal(arrays[n], before[n]) for n in arrays)
    assert all(not torch.equal(p, start[n]) for n, p in trainable(model).items())


def test_statistics_do_not_write_through():
    _, arrays, model = attached("resnet", Full())
    before = {n: a.copy() for n, a in arrays.items()}
    model.train()
    model(images() + 3)
    changed = [n for n, b in model.named_buffers() if not np.array_equal(b.numpy(), arrays[n])]
    assert any(n.endswith("running_mean") for n in changed)
    assert all(np.array_equal(arrays[n], before[n]) for n in arrays)


def test_what_can_change_is_copied_out():
    model = build("resnet", Head())
    arrays = dump(model)
    before = arrays["head.weight"].copy(), arrays["net.bn1.running_mean"].copy()
    with torch.no_grad():
        model.head.weight.add_(1)
        model.net.bn1.running_mean.add_(1)
    assert np.array_equal(arrays["head.weight"], before[0])
    assert np.array_equal(arrays["net.bn1.running_mean"], before[1])
    assert address(arrays["net.conv1.0.weight"]) == model.net.conv1[0].weight.data_ptr()


class Odd(nn.Module):
    """Buffers a state dict leaves out, a tied parameter, a constructor that needs values."""

    def __init__(self, needs_values=False):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.register_buffer("scale", torch.full((2,), 3.0), persistent=False)
        if needs_values:
            self.threshold = float(torch.rand(1).item())
        self.requires_grad_(False)

    def forward(self, x):
        return self.b(self.a(x)) * self.scale


def test_non_persistent_buffers_and_tied_parameters():
    source = Odd()
    arrays = dump(source)
    assert "scale" in arrays
    model = skeleton(Odd)
    attach(model, arrays)
    assert model.a.weight is model.b.weight
    assert torch.equal(model(torch.ones(1, 2)), source(torch.ones(1, 2)))
    assert model.state_dict().keys() == source.state_dict().keys()


def test_a_constructor_that_needs_values_is_run_for_real():
    model = skeleton(lambda: Odd(needs_values=True))
    assert not model.a.weight.is_meta
    source = Odd()
    arrays = dump(source)
    attach(model, arrays)
    assert model.a.weight.data_ptr() == address(arrays["a.weight"])


def test_a_constructor_that_fails_for_another_reason_raises():
    with pytest.raises(ValueError, match="mine"):
        skeleton(lambda: (_ for _ in ()).throw(ValueError("mine")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("head.bias"), "'head.bias' is not among the shared tensors"),
        (lambda a: a.update(more=np.ones(1)), "'more' is unknown to the model"),
        (
            lambda a: a.update({"head.bias": np.ones(3, np.float32)}),
            r"'head.bias' is float32 \(5,\), but float32 \(3,\)",
        ),
        (lambda a: a.update({"head.bias": np.ones(5)}), r"float32 \(5,\), but float64 \(5,\) was shared"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, message):
    arrays = dump(build())
    change(arrays)
    with pytest.raises(ValueError, match=message):
        attach(skeleton(build), arrays)


def test_a_tensor_that_nobody_shares_is_found():
    def odd():
        model = Odd()
        model.plain = torch.ones(2)
        return model

    with pytest.raises(ValueError, match="plain is a plain tensor"):
        attach(skeleton(odd), dump(odd()))


def test_the_checksum_sees_frozen_weights_and_nothing_else():
    model = build()
    before = checksum(model)
    with torch.no_grad():
        model.head.weight.add_(1)
    assert checksum(model) == before
    with torch.no_grad():
        model.net.norm.bias[0] += 1e-3
    assert checksum(model) != before


@pytest.mark.parametrize(("kind", "tuning"), [("vit", Lora(rank=2)), ("resnet", Head()), ("mixer", Head())])
@torch.no_grad()
def test_frozen_weights_of_the_network_can_be_shared_in_half_the_bytes(kind, tuning):
    source = build(kind, tuning)
    full, half = dump(source), read_only(dump(source, half=True))
    products = (nn.Linear, nn.Conv2d)
    owned = {id(p) for m in source.modules() if isinstance(m, products) for p in m.parameters(recurse=False)}
    rounded = {
        n for n, p in source.named_parameters() if not p.requires_grad and "net." in n and id(p) in owned
    }
    assert kind == "resnet" or any(n.endswith("bias") for n in rounded)
    assert any(n.endswith("weight") for n in rounded)
    for name, array in full.items():
        assert array.nbytes == half[name].nbytes * (2 if name in rounded else 1), name
        if name not in rounded:
            assert np.array_equal(array, half[name]), name
    model = skeleton(lambda: build(kind, tuning, seed=1))
    attach(model, half)
    for name, p in model.named_parameters():
        assert p.dtype == (torch.bfloat16 if name in rounded else torch.float32), name
        assert (p.dtype == torch.bfloat16) == (p.data_ptr() == address(half[name]) and name in rounded), name
        kind = torch.bfloat16 if name in rounded else torch.float32
        assert torch.equal(p.float(), torch.from_numpy(full[name]).to(kind).float()), name
    assert checksum(model) != checksum(source)
    model.mixed = True
    output, exact = model.eval()(images()), source.eval()(images())
    assert output.dtype == torch.float32
    near(output, exact, sum(isinstance(m, products) for m in model.modules()), precision=torch.bfloat16)
    assert not torch.equal(output, exact)
    source.mixed = True
    assert torch.equal(output, source(images()))  # products round their weights and biases anyway


def test_a_skeleton_computes_no_start_values_and_has_the_same_tensors():
    computed = []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            computed.append(func)
            return func(*args, **(kwargs or {}))

    with Seen():
        bare = skeleton(build)
    assert computed
    assert not {torch.Tensor.normal_, torch.Tensor.clamp_, torch.Tensor.zero_} & {*computed}
    described = [
        [(n, p.shape, p.dtype, p.requires_grad) for n, p in m.named_parameters()] for m in (bare, build())
    ]
    assert described[0] == described[1]
    assert all(p.is_meta for p in bare.parameters())
