"""Optimizers that step all tensors at once have the bits of torch's."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from rayfed.fast import optimizers
from rayfed.fast.optimizers import joint_optimizer
from rayfed.federation import passes
from rayfed.federation.train_config import TrainConfig
from tests.rayfed.federation.test_client_optimizers import KINDS, named, steps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keeps", [False, True])
def test_an_optimizer_of_cuda_is_one_kernel_unless_it_keeps_counts_of_steps(kind, keeps):
    config = TrainConfig(optimizer=kind, lr=0.1, keep_optimizer=keeps)
    with FakeTensorMode():
        there = joint_optimizer(config, [nn.Parameter(torch.ones(3, device="cuda"))])
    assert bool(there.defaults["fused"]) == (kind == "sgd" or not keeps)
    assert not joint_optimizer(config, named().values()).defaults["fused"]


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_the_state_of_fused_adam_begins_as_one_tensor_of_zeros_with_the_bits_of_torch(kind, monkeypatch):
    monkeypatch.setattr(optimizers, "is_fused", lambda config, params: True)
    config = TrainConfig(optimizer=kind, lr=0.01, weight_decay=0.1)
    made = {"torch": passes.KINDS[kind], "ours": partial(joint_optimizer, config)}
    found, states = {}, {}
    for who, make in made.items():
        params = {n: nn.Parameter(torch.linspace(1, 2, 65 * n).view(n, 65)) for n in (1, 2, 3)}
        own = {"lr": 0.01, "weight_decay": 0.1, "betas": config.betas, "eps": config.eps, "fused": True}
        optimizer = make(params.values(), **own) if who == "torch" else make(params.values())
        for step in range(3):
            for n, p in params.items():  # the last one has no gradient in the first step
                p.grad = None if n == 3 and not step else p.detach().square() - 1.5
            optimizer.step()
        found[who] = [p.detach() for p in params.values()]
        states[who] = [optimizer.state[p] for p in params.values()]
    assert all(map(torch.equal, found["ours"], found["torch"]))
    for ours, theirs in zip(states["ours"], states["torch"], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    places = {state[key].untyped_storage().data_ptr() for state in states["ours"] for key in state}
    assert len(places) == 2  # one for each step in which tensors begin


@pytest.mark.parametrize("kind", KINDS)
def test_small_tensors_are_stepped_in_one_call_with_the_same_bits(kind, monkeypatch):
    config = TrainConfig(optimizer=kind, lr=0.3, momentum=0.9, weight_decay=0.1)
    ends = []
    for few in (4, 5):  # 5 numbers are trained
        monkeypatch.setattr("rayfed.fast.optimizers.FEW_NUMBERS", few)
        params = named()
        optimizer = joint_optimizer(config, params.values())
        assert optimizer.defaults["foreach"] is (True if few == 5 else None)
        steps(optimizer, params, 4)
        ends.append(torch.cat([p.detach() for p in params.values()]))
    assert torch.equal(*ends)
