"""Clients that train whole networks of their own together: their updates, their launches, who is left out."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from rayfed.engine.loop import run_rounds
from rayfed.executors.inline import InlineExecutor
from rayfed.fast import group
from rayfed.federation.params import digest
from rayfed.testing import small_setup
from tests.conftest import STEADY
from tests.pretended import pretended
from tests.rayfed.fast.test_group import ExactAnswers, check_agreement, moved, played, prepared
from tests.rayfed.fast.test_group_device import agree
from tests.rounding import equally_near, exact_numbers, exact_setup

NETWORKS = ("cnn", "dropping_cnn", "grey_cnn", "perceptron", "resnet")
MIXER = ("model=mixer_mini", "model.options={}")
UNEQUAL = (
    *("data.partition.clients_per_domain=3", "data.limit=60", "data.partition.scheme=quantity"),
    *("data.partition.min_samples=2", "train.batch_size=4"),
)
"""Six clients of 2 to 31 images, of whom five train together, with unequal last batches."""

WAYS = (
    "train.momentum=0.9 train.weight_decay=0.01",
    "train.optimizer=adam train.eps=1.0e-4 train.weight_decay=0.01",
    "train.clip_norm=0.5",
    "train.local_steps=4",
    "data.augment.flip={}",
    "algorithm=fedprox",
    "algorithm=ditto",
)


def whole(network, *overrides):
    """An experiment with a network of `tests.whole_networks`."""
    model = (
        MIXER if network == "mixer" else (f"model.name=tests.whole_networks:{network}", "model.options={}")
    )
    return prepared("algorithm=fedavg", "tuning=full", *model, "train.group=5", *overrides)


@pytest.fixture
def loops(monkeypatch):
    """Whether each group was trained in one loop."""
    seen = []
    train_all = group.train_all

    def noted(*args):
        seen.append(train_all(*args))
        return seen[-1]

    monkeypatch.setattr(group, "train_all", noted)
    return seen


@pytest.mark.parametrize("network", [*NETWORKS, pytest.param("mixer", marks=STEADY)])
def test_unequal_clients_have_the_updates_of_single_clients(network, loops):
    setup = whole(network, *UNEQUAL)
    assert setup.group.clients == 5
    alone, _ = played(setup, 1)
    grouped, _ = played(setup, 5)
    with exact_numbers():
        exact, _ = played(exact_setup(setup), 1, executor=ExactAnswers(setup))
    assert grouped.together == 5
    assert loops == [True]
    assert [a.steps for _, a in alone.seen] == [a.steps for _, a in grouped.seen]
    assert len({a.steps for _, a in grouped.seen}) > 1
    equally_near(*([moved(*pair) for pair in each.seen] for each in (alone, grouped, exact)))


@pytest.mark.parametrize("network", [*NETWORKS, pytest.param("mixer", marks=STEADY)])
def test_on_a_device_too(network, loops):
    agree(whole(network, *UNEQUAL), group=5)
    assert loops == [True]


@pytest.mark.parametrize("way", [WAYS[0], *(pytest.param(way, marks=STEADY) for way in WAYS[1:])])
def test_every_way_to_train_agrees(way):
    check_agreement(whole("resnet", *way.split()))


@pytest.mark.parametrize("network", ["dropping_cnn", pytest.param("resnet", marks=STEADY)])
def test_groups_of_four_and_of_thirty_two_agree(network):
    few = ("data.partition.clients_per_domain=16", "data.limit=128", "train.local_steps=2")
    setup = whole(network, *few)
    alone, _ = played(setup, 1)
    grouped = [played(setup, size)[0] for size in (4, 32)]
    with exact_numbers():
        exact, _ = played(exact_setup(setup), 1, executor=ExactAnswers(setup))
    for each in grouped:
        assert each.together == 32
        equally_near(*([moved(*pair) for pair in run.seen] for run in (alone, each, exact)))


def test_a_group_gives_the_same_bits_again():
    setup = whole("dropping_cnn", *UNEQUAL)
    assert digest(played(setup, 5, 2)[1]) == digest(played(setup, 5, 2)[1])


@pytest.mark.parametrize("network", ["cnn", "perceptron", "resnet"])
def test_a_step_of_thirty_two_clients_has_at_most_half_as_many_launches_more(network):
    kernels = [launches(network, clients) for clients in (1, 32)]
    assert kernels[0] > 20
    assert kernels[1] <= 1.5 * kernels[0]


def launches(network, clients):
    """Launches of one more step of all clients."""
    few = (f"data.partition.clients_per_domain={clients}", f"data.limit={4 * clients}", "train.batch_size=2")
    model = (f"model.name=tests.whole_networks:{network}", "model.options={}", "data.domains=[plain]")
    setup = small_setup("algorithm=fedavg", "tuning=full", *model, *few, f"train.group={clients}")
    counts = []
    for steps in (1, 2):
        context = replace(setup.context, train=replace(setup.context.train, local_steps=steps))
        experiment = replace(setup.experiment, rounds=1, evaluate_every=0)
        with pretended() as device:
            executor = InlineExecutor(context, setup.weights, device=device.name)
            device.counts.clear()
            list(run_rounds(experiment, executor, setup.start))
            counts.append(device.counts.kernels)
    return counts[1] - counts[0]


class Changed(nn.Module):
    """A small network, of which subclasses change something."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3 * 32 * 32, 8), nn.Linear(8, 10)

    def middle(self, h):
        return h

    def forward(self, x):
        return self.last(torch.tanh(self.middle(self.first(x.flatten(1)))))


class Scaled(Changed):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def middle(self, h):
        return self.scale * h + h * self.scale + self.scale


class Normalized(Changed):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def middle(self, h):
        return self.norm(h)


class Standardized(Changed):
    def middle(self, h):
        return h @ (self.last.weight - self.last.weight.mean()).T @ self.last.weight


class Drawing(Changed):
    def middle(self, h):
        return nn.functional.dropout(h, 0.5, self.training)


class Switching(Changed):
    def train(self, mode=True):
        return super().train(mode)


class Embedded(Changed):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 8)

    def middle(self, h):
        return h + self.table((h[:, 0] > 0).long())


@pytest.mark.parametrize(
    ("network", "why"),
    [
        (Scaled, ""),
        (Normalized, "statistic over the images of a batch"),
        (Standardized, "cannot run for several clients at once"),
        (Drawing, "draws random numbers itself"),
        (Switching, "its own train()"),
        (Embedded, "embedding cannot be computed for several clients at once"),
    ],
)
def test_the_header_says_why_clients_with_a_network_are_trained_one_by_one(network, why, monkeypatch):
    monkeypatch.setattr("tests.whole_networks.cnn", network)
    setup = whole("cnn")
    assert setup.group.clients == (1 if why else 5)
    assert why in setup.group.sentence
    if not why:
        check_agreement(setup)


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_auto_trains_whole_networks_one_by_one_with_every_method(method):
    """Else methods that equal FedAvg would differ from it in the last bits, as they take other passes."""
    few = ("data.partition.clients_per_domain=8", "data.limit=64", "data.val=0", f"algorithm={method}")
    alone = whole("cnn", *few, "train.group=auto").group
    assert alone.clients == 1
    assert alone.sentence.endswith("because train.group=auto leaves whole networks alone")
    assert whole("cnn", *few, "train.group=4").group.clients == 4


@pytest.mark.ray
def test_where_clients_run_changes_no_bit(pool_of_two):
    setup = whole("dropping_cnn", *UNEQUAL, "rounds=2")
    *_, alone = run_rounds(setup.experiment, InlineExecutor(setup.context, setup.weights), setup.start)
    *_, together = run_rounds(setup.experiment, pool_of_two(setup), setup.start)
    assert digest(together.state.params) == digest(alone.state.params)
