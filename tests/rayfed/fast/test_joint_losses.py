"""Losses of several clients in one call: the updates of clients that compute their own, in few operations."""

import pytest
import torch

from rayfed.fast.group import Group
from tests.conftest import STEADY
from tests.pretended import pretended
from tests.rayfed.fast.test_group import UNEVEN, Answers, moved, played, prepared
from tests.rayfed.fast.test_group_device import judge
from tests.rounding import equally_near, exact_numbers, exact_setup

SMALL = ("data.limit=40", UNEVEN, "train.batch_size=4", "train.local_steps=3")
"""Clients whose last batches have unequally many images."""

STEADILY = ("train.optimizer=adam", "train.lr=0.001", "train.eps=1e-2")
"""With train.eps above the rounding of gradients: docs/performance.md says why."""


@pytest.fixture
def joint(monkeypatch):
    """How many clients computed each loss together; fails where clients had to compute theirs alone."""
    counts = []
    gradients = Group._gradients

    def counted(self, members, losses):
        gradients(self, members, losses)
        counts.append(len(members))

    monkeypatch.setattr(Group, "_gradients", counted)
    return counts


def runs(setup, groups, rounds, local=None):
    """What clients on the device learn and measure: alone, in groups of each size, and in float64."""
    with pretended() as device:
        every = [
            played(setup, group, rounds, local=local, executor=Answers(setup, device=device.name))[0]
            for group in (1, *groups)
        ]
        with exact_numbers():
            exact, _ = played(exact_setup(setup), 1, rounds, local=local, executor=judge(setup, device.name))
    assert [each.together > 0 for each in every] == [False, *(group > 1 for group in groups)]
    moves = [[moved(*pair) for pair in each.seen] for each in (*every, exact)]
    told = [[update.metrics for _, update in each.seen] for each in (*every, exact)]
    return moves, told


def agree(setup, groups=(3,), rounds=3, local=None):
    """Assert that groups are as near to float64 as single clients, in what they learn and measure."""
    (alone, *grouped, exact), (own, *told, truth) = runs(setup, groups, rounds, local)
    for each in grouped:
        equally_near(alone, each, exact)
    names = sorted({name for metrics in own for name in metrics})
    for each in told:
        assert [sorted(metrics) for metrics in each] == [sorted(metrics) for metrics in own]
        for name in names:
            equally_near(*(_numbers(run, name) for run in (own, each, truth)))


def _numbers(run, name):
    found = [metrics[name] for metrics in run if name in metrics]
    return [torch.tensor(found, dtype=torch.float64)]


METHODS = [
    "fedgcr",
    pytest.param("fedgcr local.first_loss=both tuning.feature_dropout=0.3", marks=STEADY),
    pytest.param("fedgcr local.lambda_mode=authors local.z0_model=stale local.similarity=dot", marks=STEADY),
    "fedclip",
    pytest.param("fedclip local.mu=0.1 local.objective=class", marks=STEADY),
]


@pytest.mark.parametrize("overrides", METHODS)
def test_losses_of_a_group_are_those_of_single_clients(overrides, joint):
    agree(prepared(*f"algorithm={overrides}".split(), *SMALL))
    assert max(joint) == 3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedgcr", "fedclip"])
def test_groups_of_four_and_of_thirty_two_agree(method, joint):
    clients = ("data.partition.clients_per_domain=16", "data.limit=100")
    setup = prepared(f"algorithm={method}", *clients, "train.batch_size=2", "train.local_steps=2", *STEADILY)
    agree(setup, groups=(4, 32), rounds=2)
    assert max(joint) == 32
