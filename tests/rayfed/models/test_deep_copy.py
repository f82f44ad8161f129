"""Copies of networks whose hooks and functions use the network itself: they use the copy."""

from functools import partial

import pytest
import torch
from torch import nn

from rayfed.experiment.experiment import end_session
from rayfed.models.deep_copy import deep_copy
from tests.rayfed.models.own import Own
from tests.rayfed.models.test_examine import run


class Centred(Own):
    """A moving mean of features and a scale, as methods of the network."""

    def add(self):
        self.register_buffer("mean", torch.zeros(8))
        self.scale = nn.Parameter(torch.ones(8))
        self.connect()

    def connect(self):
        """Say what notes features, and what scales them."""
        self.a.register_forward_hook(self.note)
        self.act = self.scaled

    def note(self, layer, inputs, output):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * output.detach().mean(0))

    def scaled(self, h):
        return h * self.scale

    def middle(self, h):
        return self.act(h - self.mean)


class ByVariables(Centred):
    """The same by functions that have the network as a variable."""

    def connect(self):
        self.a.register_forward_hook(lambda layer, inputs, output: self.note(layer, inputs, output))
        self.act = lambda h: h * self.scale


class ByDefaults(Centred):
    """The same by a default, a function within a function, and the network in a list."""

    def connect(self):
        parts = [self]

        def inner(output):
            return self.note(None, None, output)

        def hook(layer, inputs, output, own=inner):
            own(output)

        self.a.register_forward_hook(hook)
        self.act = partial(lambda parts, h: h * parts[0].scale, parts)


@pytest.mark.parametrize("kind", [ByVariables, ByDefaults])
def test_functions_of_a_network_use_its_copy(kind):
    net, expected = kind(), run(Centred())
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = run(net)
    assert found.sha256 == expected.sha256
    assert found.loss == expected.loss
    out = found.model()
    mean = out.mean.clone()
    out.train()(torch.ones(4, 6))
    assert not torch.equal(out.mean, mean)  # the network that was handed out moves its own
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.ray
@pytest.mark.slow
def test_they_do_so_on_actors(ray_cluster):
    try:
        found = run(ByVariables(), cluster={"executor": "ray", "actors": 2})
    finally:
        end_session()
    assert found.sha256 == run(Centred()).sha256


def test_functions_that_use_nothing_of_the_network_stay_as_they_are():
    seen, net = [], nn.Linear(2, 2)
    net.note, net.plain = lambda x: seen.append(x), torch.relu
    copied = deep_copy(net)
    assert copied.note is net.note
    assert copied.plain is net.plain


def test_of_a_function_all_that_it_holds_is_copied():
    calls = []

    def outer():
        def count():
            calls.append(1)
            return len(calls)

        return count

    original = outer()
    copied = deep_copy(original)
    assert [copied(), copied()] == [1, 2]
    assert calls == []
