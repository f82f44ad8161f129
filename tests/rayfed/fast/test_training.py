"""Training of a group in one loop on a device: who is in it, and the updates of clients that train alone."""

from dataclasses import replace

import pytest
import torch

from rayfed.engine.loop import run_rounds
from rayfed.fast import group
from rayfed.fast.graphs import graphs_in
from rayfed.fast.optimizers import joint_optimizer
from rayfed.fast.steps import StepsOfAll
from rayfed.fast.training import Filling
from rayfed.federation.client import states_of
from rayfed.federation.params import digest
from rayfed.federation.train_config import TrainConfig
from tests.conftest import STEADY
from tests.pretended import pretended
from tests.pretended_graphs import recording
from tests.rayfed.fast.test_group import Answers, played, prepared
from tests.rayfed.fast.test_group_device import agree
from tests.rayfed.fast.test_steps import SETTINGS, SHAPES, Clients
from tests.rounding import near

UNEQUAL = (
    *("data.partition.clients_per_domain=3", "data.limit=60", "data.partition.scheme=quantity"),
    *("data.partition.min_samples=2", "train.batch_size=4"),
)
"""Six clients of 2 to 31 images, of whom five train together; when one has ended, its room is filled."""


@pytest.fixture
def loops(monkeypatch):
    """Whether each group could be trained in one loop, and how many batches its clients had.

    Gradients are laid out as fused optimizers of CUDA want them, which the pretended accelerator lacks.
    """
    seen = []
    train_all = group.train_all
    take = StepsOfAll.take

    def checked(self, clients, grads):
        assert all(grad is None or grad.is_contiguous() for grad in grads)
        take(self, clients, grads)

    monkeypatch.setattr(StepsOfAll, "take", checked)

    def noted(*args):
        done = train_all(*args)
        seen.append((done, [len(request.batches) for request in args[-1]]))
        return done

    monkeypatch.setattr(group, "train_all", noted)
    return seen


@pytest.mark.parametrize(
    "overrides",
    [
        "tuning.dropout=0.5",
        "train.optimizer=adam train.eps=1.0e-4",
        *(
            pytest.param(case, marks=STEADY)
            for case in (
                "tuning=bitfit train.momentum=0.9",
                "tuning=adapter",
                "tuning.residual=true",
                "tuning=exits",
                "data.resident=false",
                "train.max_steps=5",
                "train.local_steps=4",
                "model=mixer_mini model.options={}",
            )
        ),
    ],
)
def test_clients_of_different_sizes_have_the_updates_of_single_clients(overrides, loops):
    agree(prepared("algorithm=fedavg", *overrides.split(), *UNEQUAL), group=5)
    ((done, batches),) = loops
    assert done
    assert len(batches) == 5
    assert len(set(batches)) > 1 or "steps" in overrides


def test_clients_of_unequal_ranks_change_nothing_beyond_theirs(loops):
    setup = prepared("algorithm=ffa_lora", "capacity={rank: {2: 0.5, 4: 0.5}}", "tuning.rank=4", *UNEQUAL)
    assert len(set(setup.experiment.ranks.values())) == 2
    agree(setup, group=5)
    assert [done for done, _ in loops] == [True]


@pytest.mark.parametrize("overrides", ["algorithm=fedprox", "algorithm=fedavg train.clip_norm=0.5"])
def test_clients_whose_steps_are_not_the_usual_ones_train_by_themselves(overrides, loops):
    agree(prepared(*overrides.split(), *UNEQUAL), group=5)
    assert loops == []


def test_clients_with_states_of_different_ages_train_by_themselves(loops):
    """The moments of Adam need the number of steps, which differs after a visit of unequal clients."""
    setup = prepared(
        *("algorithm=fedavg", "train.optimizer=adam", "train.eps=1.0e-4", "train.keep_optimizer=true"),
        *UNEQUAL,
    )
    with pretended() as device:
        alone, _ = played(setup, 1, rounds=2, executor=Answers(setup, device=device.name))
        grouped, _ = played(setup, 5, rounds=2, executor=Answers(setup, device=device.name))
    assert [done for done, _ in loops] == [True, False]
    for client, kept in alone.stores().items():
        for name, state in kept.value["_optimizers"]["0"].items():
            for key, value in state.items():
                other = grouped.stores()[client].value["_optimizers"]["0"][name][key]
                near(value, other, 10_000, size=max(1.0, float(value.abs().max())))
                assert key != "step" or torch.equal(value, other)


def test_what_a_client_draws_afterwards_does_not_depend_on_the_others():
    """Here each client trains a second time after the loop, with draws of dropout that follow."""
    setup = prepared("algorithm=fedavg", "tuning.dropout=0.5", *UNEQUAL)
    agree(replace(setup, experiment=replace(setup.experiment, local=Twice())), group=5)


class Twice(type(prepared("algorithm=fedavg").experiment.local)):
    """Trains a second time, from where the first one ended."""

    grouped = True

    def train(self, client, sent):
        super().train(client, sent)
        return super().train(client, sent)


def test_with_graphs_the_tensors_are_those_without(loops):
    setup = prepared("algorithm=fedavg", "tuning.dropout=0.5", *UNEQUAL, "train.group=4")
    digests = []
    for graphs in (False, True):
        experiment = replace(setup.experiment, group=4, evaluate_every=0)
        context = replace(setup.context, train=replace(setup.context.train, graphs=graphs))
        with pretended() as device, recording():
            executor = Answers(replace(setup, context=context), device=device.name)
            *_, last = run_rounds(experiment, executor, setup.start)
            digests.append(digest(last.state.params))
            made = graphs_in(executor.worker.model)
    assert digests[0] == digests[1]
    assert made.used > 10
    assert all(done for done, _ in loops)


def test_four_clients_take_hardly_more_launches_than_two():
    counts = []
    for domains in ("[plain]", "[plain,street]"):
        setup = prepared("algorithm=fedavg", f"data.domains={domains}", "data.limit=48", "train.batch_size=4")
        with pretended() as device:
            kernels = device.counts.kernels
            played(setup, 4, executor=Answers(setup, device=device.name))
            counts.append(device.counts.kernels - kernels)
    assert counts[1] < 1.05 * counts[0]


def places(*numbers):
    return [torch.tensor(each) for each in numbers]


def test_a_plan_fills_the_room_of_clients_and_gives_fillers_no_share():
    plan = Filling([places([3, 1], [2, 5], [4]), places([7, 8]), places([9])])
    assert plan.counts == [3, 1, 1]
    assert plan.rooms == [3, 1, 1]
    assert [each.tolist() for each in plan.places()] == [[3, 1, 7, 8, 9, 9], [2, 5], [4, 3]]
    assert plan.shares[0].tolist() == [[0.5, 0.5], [0.5, 0.5], [1, 0]]
    assert plan.shares[2, 0].tolist() == [1, 0]


def test_a_pass_has_room_for_at_most_twice_the_clients_that_train():
    plan = Filling([places(*[[0]] * number) for number in (5, 4, 4, 3, 2, 2, 1)])
    assert plan.counts == [7, 6, 4, 3, 1]
    assert plan.rooms == [7, 7, 4, 4, 1]
    assert [len(each) for each in plan.places()] == plan.rooms


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_steps_of_all_are_those_of_single_clients_of_whom_some_stop_early(settings):
    train = TrainConfig(lr=0.1, **settings)
    alone, together = Clients(train, False), Clients(train, True)
    names = list(SHAPES)
    taken = together.joint.of_all(together.optimizers, names, keeps=True)
    for clients in (3, 3, 2, 1):
        alone.step(range(clients))
        taken.take(clients, [torch.stack([own[n].grad for own in alone.values]) for n in names])
    taken.end()
    together.agree(alone)


def test_optimizers_that_differ_or_train_something_else_take_no_steps_together():
    train = TrainConfig(lr=0.1, optimizer="adam")
    clients = Clients(train, True)
    assert clients.joint.of_all(clients.optimizers, ["weight"], keeps=False) is None
    others = [*clients.optimizers[:-1], joint_optimizer(train, clients.values[-1].values(), lr=0.2)]
    assert clients.joint.of_all(others, list(SHAPES), keeps=False) is None
    assert not any(states_of(o, v) for o, v in zip(others, clients.values, strict=True))


def test_a_loop_that_fails_is_a_warning_and_its_clients_train_one_by_one(monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("fused kernels need the same layout")

    group._warn.cache_clear()
    monkeypatch.setattr(StepsOfAll, "take", fails)
    setup = prepared("algorithm=fedavg", "data.limit=24")
    with pretended() as device:
        _, params = played(setup, 1, executor=Answers(setup, device=device.name))
        grouped, others = played(setup, 4, executor=Answers(setup, device=device.name))
    assert grouped.together == 0
    assert digest(params) == digest(others)
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "run one by one: RuntimeError: fused kernels need the same layout; train.group=1" in told
