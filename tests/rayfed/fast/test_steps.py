"""Steps of several optimizers at once: the values and the states of single steps, and who steps alone."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from rayfed.fast import steps
from rayfed.fast.optimizers import joint_optimizer
from rayfed.fast.steps import JointSteps, Step, ask_for_steps, join_tensors
from rayfed.federation.client import resume, states_of
from rayfed.federation.train_config import TrainConfig
from tests.rounding import near

CLIENTS = 3
SHAPES = {"weight": (4, 5), "bias": (7,)}
SETTINGS = [
    {"optimizer": "sgd", "momentum": 0.0},
    {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1},
    {"optimizer": "adam"},
    {"optimizer": "adamw", "weight_decay": 0.1},
]
STEPS = 12
"""Roundings of three steps, of four operations each."""


class Clients:
    """Clients with their own values, as of a group, and their optimizers."""

    def __init__(self, train, together):
        rng = torch.Generator().manual_seed(0)
        self.stacks = {n: torch.randn(CLIENTS, *shape, generator=rng) for n, shape in SHAPES.items()}
        self.values = [{n: nn.Parameter(s[k]) for n, s in self.stacks.items()} for k in range(CLIENTS)]
        self.optimizers = [joint_optimizer(train, own.values()) for own in self.values]
        self.joint = JointSteps(self.stacks, self.values) if together else None
        self.rng = torch.Generator().manual_seed(1)

    def step(self, members=range(CLIENTS), names=tuple(SHAPES)):
        for own in self.values:
            for name, value in own.items():
                grad = torch.randn(value.shape, generator=self.rng)
                value.grad = grad if name in names else None
        if self.joint is not None:
            self.joint.take({k: self.optimizers[k] for k in members})
        else:
            for k in members:
                self.optimizers[k].step()

    def agree(self, other):
        for mine, theirs in zip(self.values, other.values, strict=True):
            for name in SHAPES:
                near(mine[name].detach(), theirs[name].detach(), STEPS, size=4.0)
        for k in range(CLIENTS):
            mine, theirs = (states_of(c.optimizers[k], c.values[k]) for c in (self, other))
            assert mine.keys() == theirs.keys()
            for name, state in mine.items():
                assert state.keys() == theirs[name].keys()
                for key, value in state.items():
                    near(value, theirs[name][key], STEPS, size=4.0)


@pytest.fixture
def counted():
    """Sizes of the tensors that optimizers step."""
    sizes = []

    def note(optimizer, *_):
        sizes.append(sum(p.numel() for p in optimizer.param_groups[0]["params"]))

    handle = register_optimizer_step_post_hook(note)
    yield sizes
    handle.remove()


ONE = 4 * 5 + 7


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_joint_steps_are_those_of_single_clients(settings, counted):
    train = TrainConfig(lr=0.1, **settings)
    alone, together = Clients(train, False), Clients(train, True)
    for clients in (alone, together):
        for _ in range(3):
            clients.step()
    assert counted == [ONE] * 3 * CLIENTS + [CLIENTS * ONE] * 3
    together.agree(alone)


@pytest.mark.parametrize("settings", SETTINGS[1:], ids=lambda s: s["optimizer"])
def test_a_client_that_goes_on_alone_leaves_the_states_of_the_others(settings, counted):
    train = TrainConfig(lr=0.1, **settings)
    alone, together = Clients(train, False), Clients(train, True)
    for clients in (alone, together):
        clients.step()
        clients.step(members=[1])
        clients.step(members=[0, 2])
        clients.step()
    together.agree(alone)
    assert counted[-3:] == [ONE, 2 * ONE, CLIENTS * ONE]


def test_clients_that_took_unequally_many_steps_of_adam_keep_their_counts(counted):
    alone, together = (Clients(TrainConfig(optimizer="adam", lr=0.1), joint) for joint in (False, True))
    for clients in (alone, together):
        clients.step(members=[1])
        clients.step()
    together.agree(alone)
    assert counted[-2:] == [ONE, CLIENTS * ONE]


def test_a_tensor_without_a_gradient_is_left_out():
    train = TrainConfig(lr=0.1, optimizer="adam")
    alone, together = Clients(train, False), Clients(train, True)
    for clients in (alone, together):
        clients.step(names=("bias",))
        clients.step()
        clients.step(names=("weight",))
    together.agree(alone)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers_of_one_kernel_are_joined(kind, counted):
    alone, together = (Clients(TrainConfig(), joint) for joint in (False, True))
    for clients in (alone, together):
        own = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        clients.optimizers = [kind(v.values(), lr=0.1, fused=True, **own) for v in clients.values]
        for _ in range(2):
            clients.step()
    assert counted[-1] == CLIENTS * ONE
    together.agree(alone)


def test_kept_states_are_continued_together(counted):
    train = TrainConfig(lr=0.1, optimizer="adam")
    alone, together = Clients(train, False), Clients(train, True)
    for clients in (alone, together):
        clients.step()
        kept = [states_of(o, own) for o, own in zip(clients.optimizers, clients.values, strict=True)]
        clients.optimizers = [joint_optimizer(train, own.values()) for own in clients.values]
        for optimizer, own, states in zip(clients.optimizers, clients.values, kept, strict=True):
            resume(optimizer, own, states)
        clients.step()
    assert counted[-1] == CLIENTS * ONE
    together.agree(alone)


@pytest.mark.parametrize("change", ["rate", "hook", "group", "foreign"])
def test_optimizers_that_differ_step_alone(change, counted):
    together = Clients(TrainConfig(lr=0.1), True)
    one = together.optimizers[1]
    if change == "rate":
        one.param_groups[0]["lr"] = 0.2
    elif change == "hook":
        one.register_step_pre_hook(lambda *_: None)
    elif change == "group":
        one.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    else:
        together.optimizers[1] = torch.optim.SGD([nn.Parameter(torch.ones(ONE))], **one.defaults)
    together.step()
    assert counted.count(2 * ONE) == len(counted) - 1 == 1  # and the others at once
    for optimizer in together.optimizers:
        optimizer.param_groups[0]["lr"] = 0.3
    if change == "rate":
        together.step()
        assert counted[-1] == CLIENTS * ONE


def test_a_rate_that_all_change_is_that_of_the_joint_step():
    alone, together = (Clients(TrainConfig(lr=0.1, momentum=0.9), kind) for kind in (False, True))
    for clients in (alone, together):
        clients.step()
        for optimizer in clients.optimizers:
            optimizer.param_groups[0]["lr"] = 0.3
        clients.step()
    together.agree(alone)


def test_gradients_of_a_joint_pass_are_joined_without_a_copy(monkeypatch):
    whole, apart = torch.randn(3, 2, 4), [torch.randn(5) for _ in range(3)]
    monkeypatch.setattr(steps.torch, "_foreach_copy_", None)
    (found,) = join_tensors([whole.unbind(0)])
    assert found.data_ptr() == whole.data_ptr()
    assert torch.equal(found, whole)
    monkeypatch.undo()
    mixed = [whole[0], whole[2], whole[1]]
    for found, wanted in zip(join_tensors([apart, mixed]), (apart, mixed), strict=True):
        assert torch.equal(found, torch.stack(wanted))
    transposed = whole.mT.unbind(0)
    assert torch.equal(join_tensors([transposed])[0], whole.mT)


def test_a_step_is_asked_for_and_one_with_a_closure_is_taken():
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    asked = []
    ask_for_steps(optimizer, asked.append)
    parameter.grad = torch.ones(1)
    optimizer.step()
    assert [type(request) for request in asked] == [Step]
    assert asked[0].optimizer is optimizer
    assert parameter.item() == 1
    optimizer.step(lambda: torch.zeros(()))
    assert parameter.item() == 0
