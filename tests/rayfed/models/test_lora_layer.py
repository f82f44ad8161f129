"""Our layers with LoRA have the values of PEFT to the bit."""

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.layer import Linear
from torch import nn

from rayfed.engine.count_cost import step_operations
from rayfed.errors import ConfigError
from rayfed.fast.stacked import stackable
from rayfed.models.lora_layer import (
    AdaptedLinear,
    adapt,
    frozen_linears,
    merge,
    quantize,
)
from rayfed.testing import small_setup
from rayfed.tuning.base import load, sent_tensors
from tests.pretended import Mode, pretended
from tests.rounding import near

LONGEST = 2 * 4 * 4 * 256
"""Roundings of a pass forward and back: four blocks, four products in each, sums of at most 256 terms."""


def built(*overrides):
    return small_setup("algorithm=fedavg", "data.domains=[plain]", *overrides).context.build()


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, AdaptedLinear)]


def images(model, rows):
    return torch.randn(rows, 3, model.size, model.size, generator=torch.Generator().manual_seed(0))


def outputs_and_gradients(model, x, leaves):
    torch.manual_seed(3)
    output = model(x)
    weights = torch.arange(output.numel(), dtype=output.dtype).view(output.shape).sin()
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)]


class Operations(Mode):
    """Notes the names of operations, but for views, and those with a large result in float32."""

    def __init__(self, large):
        super().__init__()
        self.large = large
        self.seen = []
        self.wide = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.seen.append(func.overloadpacket.__name__)
            if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
                self.wide += [func] * (result.numel() >= self.large)
        return result


def one_layer(dropout, dtype):
    net = torch.nn.Sequential(torch.nn.Linear(64, 32))
    torch.manual_seed(0)
    adapt(net, "0", 4, 6, dropout)
    torch.nn.init.normal_(net[0].lora_B["default"].weight)
    net[0].base_layer.to(dtype)
    return net[0].train()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_mixed_precision_casts_the_factors_and_never_the_input(dropout, monkeypatch):
    layer = one_layer(dropout, torch.bfloat16)
    x = torch.randn(2, 9, 64).bfloat16().requires_grad_()
    leaves = [x, layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    results = []
    for used in (AdaptedLinear.forward, forward_of_peft):
        monkeypatch.setattr(AdaptedLinear, "forward", used)
        torch.manual_seed(1)
        with Operations(x.numel()) as noted:
            with torch.autocast("cpu", torch.bfloat16):
                output = layer(x)
            gradients = torch.autograd.grad(output.float().square().sum(), leaves)
        results.append((noted, output, gradients))
    (ours, output, gradients), (peft, other, others) = results
    assert ours.wide == []
    assert peft.wide
    assert ours.seen.count("_to_copy") == 2 * 3  # A, B, the output for its sum of squares; and back
    assert len(ours.seen) < len(peft.seen)
    if not dropout:
        for mine, theirs in zip((output, *gradients), (other, *others), strict=True):
            assert (mine - theirs).norm() < 0.02 * theirs.norm()


def test_an_input_in_float32_is_rounded_once_in_mixed_precision():
    layer = one_layer(0.0, torch.bfloat16)
    with torch.no_grad(), Operations(1) as noted, torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(2, 9, 64))
    assert noted.seen.count("_to_copy") == 3  # the input, A and B


def test_operations_are_counted_as_those_of_peft(monkeypatch):
    model = small_setup("algorithm=fedavg", "data.domains=[plain]").context.skeleton()
    found = step_operations(model, keeps_features=False)
    with_peft(monkeypatch)
    assert found == step_operations(model, keeps_features=False)
    assert found[1] > 0


@pytest.mark.parametrize("shape", [(9,), (2, 9), (2, 3, 3)])
def test_a_device_adds_the_products_in_place(shape):
    layer = one_layer(0.0, torch.float32)
    x = torch.randn(*shape, 64)
    leaves = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    here = layer(x)
    wanted = torch.autograd.grad(here.sin().sum(), leaves)
    with pretended() as device:
        there = layer.to(device.name)
        given = x.to(device.name)
        device.counts.clear()
        output = there(given)
        assert device.counts.kernels == 3
        leaves = [there.lora_A["default"].weight, there.lora_B["default"].weight]
        found = torch.autograd.grad(output.sin().sum(), leaves)
        for mine, theirs in zip((output, *found), (here, *wanted), strict=True):
            near(mine.detach().inner, theirs.detach(), LONGEST)


def forward_of_peft(layer, x):
    """Output of PEFT's own layer with the parts of one of ours."""
    rank, scale = layer.r["default"], layer.scaling["default"]
    options = LoraConfig(r=rank, lora_alpha=scale * rank)
    with torch.random.fork_rng(devices=[]):
        theirs = Linear(layer.base_layer, "default", options, r=rank, lora_alpha=scale * rank)
    theirs.scaling = layer.scaling
    for name in ("lora_A", "lora_B", "lora_dropout"):
        setattr(theirs, name, getattr(layer, name))
    return theirs(x)


def with_peft(monkeypatch, kind=AdaptedLinear):
    monkeypatch.setattr(kind, "forward", forward_of_peft)


class EveryLayer(torch.nn.Module):
    """Has every type of layer that can be adapted, one of them in a list."""

    def __init__(self):
        super().__init__()
        nn = torch.nn
        self.words = nn.Embedding(11, 12, padding_idx=0)
        self.line = nn.Conv1d(12, 6, 3, padding=1)
        self.plane = nn.Conv2d(6, 8, 3, stride=2, groups=2)
        self.space = nn.Conv3d(1, 2, (1, 2, 2))
        self.last = nn.ModuleList([nn.Linear(2 * 8, 5, bias=False)])

    def forward(self, x):
        found = self.line(self.words(x).mT)  # (B, 6, 9)
        found = self.plane(found[..., None].expand(-1, -1, -1, 9))
        return self.last[0](self.space(found[:, None]).mean((3, 4)).flatten(1))


ALL = r"words|line|plane|space|last\.0"


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_layers_of_every_type_start_and_train_as_those_of_peft(dtype):
    torch.manual_seed(0)
    ours, theirs = EveryLayer().to(dtype), EveryLayer()
    theirs.load_state_dict(ours.state_dict())
    theirs.to(dtype)
    torch.manual_seed(1)
    adapt(ours, ALL, 4, 6, 0.2)
    torch.manual_seed(1)
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=6, lora_dropout=0.2, target_modules=ALL), theirs)
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    x = torch.randint(0, 11, (3, 9))
    found = []
    for net in (ours, theirs):
        factors = {n: p for n, p in net.named_parameters() if "lora_" in n}
        assert len(factors) == 2 * 5
        rng = torch.Generator().manual_seed(2)
        start = [p.detach().clone() for p in factors.values()]
        for p in factors.values():
            p.data += torch.randn(p.shape, generator=rng, dtype=p.dtype) / 4
        with torch.enable_grad():
            found.append([*start, *outputs_and_gradients(net.train(), x, [*factors.values()])])
    assert [v.dtype for v in found[0]] == [v.dtype for v in found[1]]
    assert all(map(torch.equal, *found))
    assert ours.last[0].weight is ours.last[0].base_layer.weight


@pytest.mark.numeric
def test_merged_layers_give_what_adapted_ones_gave():
    torch.manual_seed(0)
    net = EveryLayer()
    names, x = [*net.state_dict()], torch.randint(0, 11, (3, 9))
    adapt(net, r"words|line|space|last\.0", 4, 6, 0.0)
    frozen = net.line.base_layer.weight.clone()
    shared = net.line.base_layer.weight
    for name, value in net.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(value, std=0.3)
    net.last[0].register_buffer("lora_R", torch.randn(5, 16))
    net.last[0].register_forward_hook(
        lambda layer, given, out: out + layer.scaling["default"] * given[0] @ layer.lora_R.T
    )
    wanted = net.eval()(x)
    assert merge(net) == 4
    assert [*net.state_dict()] == names
    near(net(x), wanted, 4 * 16 * 4)
    assert torch.equal(shared, frozen)  # which other processes map
    assert merge(net) == 0


def test_a_convolution_with_groups_cannot_be_merged():
    net = EveryLayer()
    adapt(net, "plane", 4, 4, 0.0)
    with pytest.raises(
        ConfigError, match="merged: a convolution with groups=2 and padding_mode=zeros cannot"
    ):
        merge(net)


def test_a_dilated_convolution_can_be_adapted():
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, dilation=2))
    x = torch.randn(2, 3, 9, 9)
    before = net(x)
    adapt(net, "0", 2, 2, 0)
    assert torch.equal(net(x), before)
    torch.nn.init.normal_(net[0].lora_B["default"].weight)
    assert net(x).shape == before.shape
    assert not torch.equal(net(x), before)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("tuning.alpha=5",),
        ("tuning.residual=true",),
        ("tuning.core=true",),
        ("model=mixer_mini", "model.options={}"),
    ],
)
def test_one_client_has_the_bits_of_peft(overrides, monkeypatch):
    model = built("tuning.dropout=0.3", *overrides).train()
    assert len(layers_of(model)) == sum(n.endswith("lora_A") for n in model.tensors()) > 1
    leaves = [entry.tensor for entry in stackable(model).values() if not entry.is_buffer]
    with torch.no_grad():
        for leaf in leaves:
            leaf += torch.randn(leaf.shape, generator=torch.Generator().manual_seed(1)) / 8
    ours = outputs_and_gradients(model, images(model, 4), leaves)
    with_peft(monkeypatch)
    theirs = outputs_and_gradients(model, images(model, 4), leaves)
    assert all(map(torch.equal, ours, theirs))


class Rounded(nn.Module):
    """A linear layer with two numbers of its weight in a byte, as a library for four bits has it."""

    def __init__(self, layer):
        super().__init__()
        self.shape, self.bias = layer.weight.shape, layer.bias
        self.unit = layer.weight.detach().abs().max() / 7
        codes = (layer.weight.detach() / self.unit).round().flatten().to(torch.uint8) + 8
        self.weight = nn.Parameter((16 * codes[::2] + codes[1::2])[:, None], requires_grad=False)

    def values(self):
        pairs = torch.stack([self.weight[:, 0] // 16, self.weight[:, 0] % 16], 1)
        return (pairs.float().view(self.shape) - 8) * self.unit

    def forward(self, x):
        return torch.nn.functional.linear(x, self.values(), self.bias)


def test_a_base_of_four_bits_leaves_adapters_and_residuals_as_they_are():
    model = built("tuning=lora", "tuning.rank=2", "tuning.alpha=3", "tuning.residual=true").eval()
    g = torch.Generator().manual_seed(0)
    load(model, {n: torch.randn(v.shape, generator=g) / 8 for n, v in sent_tensors(model).items()})
    before = {name: value.clone() for name, value in sent_tensors(model).items()}
    quantize(model, Rounded)
    assert not frozen_linears(model)
    assert {name: value.shape for name, value in sent_tensors(model).items()} == {
        name: value.shape for name, value in before.items()
    }
    assert all(torch.equal(value, before[name]) for name, value in sent_tensors(model).items())
    assert not any(p.requires_grad for n, p in model.named_parameters() if ".base_layer." in n)
    layer = layers_of(model)[0]
    base, residual = layer.base_layer, layer.lora_R
    assert residual.shape == base.shape
    assert base.weight.shape == (base.shape.numel() // 2, 1)
    x = torch.randn(3, layer.in_features, generator=g)
    product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight + residual
    expected = x @ base.values().T + base.bias + 1.5 * x @ product.T
    near(layer(x), expected, 4 * layer.in_features, 4.0)
    layer(x).sum().backward()
    assert layer.lora_A["default"].weight.grad.any()


def test_frozen_factors_are_no_base_of_four_bits():
    model = built("tuning=lora", "tuning.freeze_a=true")
    names = frozen_linears(model)
    assert names
    assert all(".lora_" not in name for name in names)
