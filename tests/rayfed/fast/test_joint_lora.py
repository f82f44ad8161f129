"""Linear layers with LoRA in few operations: on a device, and for several clients, the values of PEFT."""

import pytest
import torch

from rayfed.fast import joint_lora
from rayfed.fast.joint_lora import (
    AddLowRank,
    FrozenAndLowRank,
    JointAdaptedLinear,
    JointCasts,
    use_joint_adapters,
    use_joint_casts,
)
from rayfed.fast.stacked import Stacked, stackable
from rayfed.models.lora_layer import twice_differentiable
from rayfed.models.named_tensors import bound
from tests.pretended import pretended
from tests.pretended_autocast import mixed_precision
from tests.rayfed.models.test_lora_layer import (
    LONGEST,
    built,
    images,
    layers_of,
    one_layer,
    outputs_and_gradients,
    with_peft,
)
from tests.rounding import near

CLIENTS = 3


def joint_model(*overrides):
    """A model whose adapters are computed in few operations."""
    model = built(*overrides)
    use_joint_adapters(model)
    assert {type(layer) for layer in layers_of(model)} == {JointAdaptedLinear}
    return model


def curvature(layer, x):
    """Derivatives by input and factors of the sum of squares of the gradients of the factors."""
    leaves = [x, layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    first = torch.autograd.grad(layer(x).sin().sum(), leaves[1:], create_graph=True)
    return torch.autograd.grad(sum(each.square().sum() for each in first), leaves)


def test_a_device_has_second_derivatives_where_they_are_asked_for_and_else_raises():
    layer = one_layer(0.0, torch.float32)
    layer.base_layer.requires_grad_(False)
    use_joint_adapters(layer)
    x = torch.randn(9, 64)
    wanted = curvature(layer, x.clone().requires_grad_())
    with pretended() as device:
        there = layer.to(device.name)
        given = x.to(device.name).requires_grad_()
        with twice_differentiable():
            found = curvature(there, given)
        for mine, theirs in zip(found, wanted, strict=True):
            near(mine.inner, theirs, 4 * LONGEST)
        with pytest.raises(RuntimeError, match="need `with twice_differentiable"):
            curvature(there, given)


def test_all_factors_of_a_device_are_cast_in_one_launch_each_way():
    counted = []
    for joint in (False, True):
        model = joint_model("tuning.dropout=0", "tuning.freeze_a=true")
        layers = layers_of(model)
        with pretended() as device, mixed_precision():
            model = model.to(device.name).train()
            if joint:
                use_joint_casts(model)
            model.mixed = True
            x = images(model, 2).to(device.name)
            device.counts.clear()
            output = model(x)
            forward = device.counts.casts
            device.counts.clear()
            output.square().sum().backward()
            counted.append((forward, device.counts.casts))
            for layer in layers:
                assert layer.lora_A["default"].weight.grad is None
                assert layer.lora_B["default"].weight.grad.dtype == torch.float32
                assert "_cast" not in vars(layer)
    (forward, back), (fewer, fewer_back) = counted
    assert forward - fewer == 2 * len(layers) - 1
    assert back - fewer_back == len(layers) - 1


def test_casts_are_differentiable_twice_and_leave_frozen_tensors_out():
    given = [torch.randn(3, requires_grad=True), torch.randn(2), torch.randn(4, requires_grad=True)]
    casts = JointCasts.apply(torch.bfloat16, *given)
    assert [cast.requires_grad for cast in casts] == [True, False, True]
    assert all(torch.equal(cast, value.bfloat16()) for cast, value in zip(casts, given, strict=True))
    (first,) = torch.autograd.grad(casts[0].float().pow(3).sum(), given[0], create_graph=True)
    assert first.dtype == torch.float32
    (second,) = torch.autograd.grad(first.sum(), given[0])
    near(second, 6 * given[0].detach().bfloat16().float(), 4, precision=torch.bfloat16)


@pytest.mark.parametrize("overrides", [("tuning.alpha=5",), ("model=mixer_mini", "model.options={}")])
def test_several_clients_have_the_values_of_peft(overrides, monkeypatch):
    model = joint_model(*overrides).double().eval()
    rng = torch.Generator().manual_seed(0)
    places = {n: entry for n, entry in stackable(model).items() if "lora" in n}
    values = {
        n: torch.randn(CLIENTS, *entry.tensor.shape, dtype=torch.float64, generator=rng).div_(8)
        for n, entry in places.items()
    }
    x = images(model, 2 * CLIENTS).double().requires_grad_()
    leaves = {n: Stacked(v.requires_grad_()) for n, v in values.items()}
    monkeypatch.setattr(joint_lora, "is_frozen", lambda layer: False)
    calls = []
    apply = AddLowRank.apply
    monkeypatch.setattr(AddLowRank, "apply", lambda *args: calls.append(1) or apply(*args))
    with bound(
        places.values(), (leaves[n] for n in places)
    ):  # the network without the head, because a Backbone returns float32
        ours = outputs_and_gradients(model.net, x, [x, *values.values()])
        assert len(calls) == len(layers_of(model)) > 1
        with_peft(monkeypatch, JointAdaptedLinear)
        theirs = outputs_and_gradients(model.net, x, [x, *values.values()])
    for one, other in zip(ours, theirs, strict=True):
        near(one, other, LONGEST, precision=torch.float64)


@pytest.mark.parametrize("overrides", [("tuning.rank=4",), ("model=mixer_mini", "model.options={}")])
def test_a_frozen_layer_and_its_factors_in_one_step_have_the_values_of_two(overrides, monkeypatch):
    model = joint_model(*overrides).eval()
    places = {n: entry for n, entry in stackable(model).items() if "lora" in n}
    rng = torch.Generator().manual_seed(0)
    values = {
        n: torch.randn(CLIENTS, *entry.tensor.shape, generator=rng).div_(8).requires_grad_()
        for n, entry in places.items()
    }
    x = images(model, 4 * CLIENTS).requires_grad_()
    calls = []
    apply = FrozenAndLowRank.apply
    monkeypatch.setattr(FrozenAndLowRank, "apply", lambda *args: calls.append(1) or apply(*args))
    with bound(places.values(), (Stacked(values[n]) for n in places)):
        once = outputs_and_gradients(model, x, [x, *values.values()])
        assert len(calls) == len(layers_of(model))
        monkeypatch.setattr(joint_lora, "is_frozen", lambda layer: False)
        twice = outputs_and_gradients(model, x, [x, *values.values()])
    assert len(calls) == len(layers_of(model))
    for one, other in zip(
        once, twice, strict=True
    ):  # MKL's oldest instructions round the sum of both otherwise
        near(one, other, LONGEST)


def test_a_frozen_factor_is_the_same_for_all_clients():
    model = joint_model("tuning.freeze_a=true").eval()
    values = {n: torch.stack([entry.tensor.detach() + 0.1] * 2) for n, entry in stackable(model).items()}
    x = images(model, 1).expand(2, -1, -1, -1)
    with torch.no_grad(), bound(stackable(model).values(), (Stacked(values[n]) for n in stackable(model))):
        first, second = model(x)
    near(first, second, LONGEST)
    assert not torch.allclose(first, model(x[:1])[0])
