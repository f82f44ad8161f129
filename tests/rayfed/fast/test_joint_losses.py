"""Losses of several clients in one call: the updates of clients that compute their own, in few operations."""

import pytest
import torch
import torch.nn.functional as F

from rayfed import Local
from rayfed.fast.group import Group
from rayfed.fast.joint_losses import Joined, _FewerOperations
from rayfed.federation.local import pure
from tests.conftest import STEADY
from tests.pretended import pretended
from tests.rayfed.fast.test_group import UNEVEN, Answers, moved, played, prepared
from tests.rayfed.fast.test_group_device import judge
from tests.rounding import equally_near, exact_numbers, exact_setup, near

SMALL = ("data.limit=40", UNEVEN, "train.batch_size=16", "train.local_steps=2")
"""Clients whose last batches have unequally many images."""

STEADILY = ("train.optimizer=adam", "train.lr=0.001", "train.eps=1e-2")
"""With train.eps above the rounding of gradients: docs/performance.md says why."""


@pytest.fixture
def joint(monkeypatch):
    """Numbers of clients that computed a loss together; empty where all computed theirs alone."""
    counts = []
    gradients = Group._gradients

    def counted(self, members, losses):
        gradients(self, members, losses)
        counts.append(len(members))

    monkeypatch.setattr(Group, "_gradients", counted)
    return counts


def runs(setup, groups, rounds, local=None):
    """Moves and measures of clients on the device: alone, in groups of each size, and in float64."""
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
    pytest.param("fedclip tuning=residual_adapter", marks=STEADY),
    *(pytest.param(method, marks=STEADY) for method in ("moon", "fedprox", "feddyn", "hetlora")),
]


@pytest.mark.parametrize("overrides", METHODS)
def test_losses_of_a_group_are_those_of_single_clients(overrides, joint):
    agree(prepared(*f"algorithm={overrides}".split(), *SMALL))
    assert joint


class Reading(Local):
    """Says that its loss is pure, and reads a number of a tensor after a pass."""

    @pure
    def loss(self, client, sent, batch):
        loss = super().loss(client, sent, batch)
        return loss if float(loss.detach()) < 100 else loss / 2


def test_clients_compute_losses_alone_that_cannot_be_joined_with_the_same_draws(joint):
    agree(prepared("algorithm=fedavg", "tuning.dropout=0.5", *SMALL), rounds=1, local=Reading())
    assert not joint


def test_values_that_a_client_changes_are_joined_anew():
    known = {}
    values = [torch.zeros(2), torch.ones(2)]
    first, again = (Joined(torch.device("cpu"), known) for _ in range(2))
    first.place(values, ("own",))
    again.place(values, ("own",))
    assert first.tensors[0] is again.tensors[0]
    values[0] += 5
    changed = Joined(torch.device("cpu"), known)
    changed.place(values, ("own",))
    assert changed.tensors[0].tolist() == [[5, 5], [1, 1]]
    assert changed.dims == [0]


def test_what_all_clients_have_in_common_is_not_joined():
    shared = torch.ones(2)
    joined = Joined(torch.device("cpu"), {})
    parts = joined.place([{"a": shared, "b": 1, "c": "x"}, {"a": shared, "b": 2, "c": "x"}], ())
    assert joined.dims == [None, 0]
    assert joined.tensors[1].tolist() == [1, 2]
    assert parts["c"] == "x"


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropies_in_fewer_operations_are_those_of_torch(reduction, smoothing):
    output, y = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)), torch.arange(7) % 5
    options = {"reduction": reduction, "label_smoothing": smoothing}
    with _FewerOperations():
        found = F.cross_entropy(output, y, **options)
    near(found, F.cross_entropy(output, y, **options), 2 * 5 + 7)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedgcr", "fedclip"])
def test_groups_of_four_and_of_thirty_two_agree(method, joint):
    clients = ("data.partition.clients_per_domain=16", "data.limit=100")
    setup = prepared(f"algorithm={method}", *clients, "train.batch_size=2", "train.local_steps=2", *STEADILY)
    agree(setup, groups=(4, 32), rounds=2)
    assert max(joint) == 32
