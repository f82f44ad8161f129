"""Clients that share their passes: the same updates as alone, for every tuning and method."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from rayfed.engine.loop import run_rounds
from rayfed.errors import ClientError
from rayfed.executors.inline import InlineExecutor
from rayfed.fast.group import _warn
from rayfed.federation.client_tasks import fit
from rayfed.federation.cohort import TRAINING
from rayfed.federation.executor import Policy, units
from rayfed.federation.local import Local
from rayfed.federation.params import digest
from rayfed.testing import small_setup
from rayfed.types import Broadcast
from tests.cohorts import make_cohort
from tests.conftest import ROOT, STEADY
from tests.rounding import Exact, equally_near, exact_numbers, exact_setup

TUNINGS = [
    "tuning=lora",
    "tuning.residual=true",
    "tuning.stem=true",
    "tuning=bitfit",
    "tuning=adapter",
    "tuning=ssf",
    "tuning=ia3",
    "tuning=visual_prompt",
    "tuning=gc_prompt",
    "tuning=exits",
    "tuning=head train.cache_features=false",
    "tuning=residual_adapter",
    "tuning=lora capacity=dynamic",
    "tuning=lora model=clip_mini",
    # With train.eps above the rounding of gradients; docs/performance.md says what Adam does below it.
    "tuning=bitfit train.optimizer=adam train.eps=1.0e-4",
]
UNEVEN = "data.partition.scheme=dirichlet"
FAST = ("fedprox", "fedgcr", "scaffold", "ditto", "bgp", "depthfl")
ALONE = (
    *("centralized", "feddpa", "fedkseed", "fedmix", "local", "lora_a2", "pfedmma", "slora", "zero_shot"),
)
"""One client, own training, second derivatives, nothing sent, layers that two networks have in
common, networks that change between passes, or nothing trained."""

WITH_OPTIONS = ("fedavg model=mixer_mini model.options={}", "fedbn tuning=bitfit")
"""FedBN's own tuning trains most of the model, which clients cannot share."""

NAMES = {file.stem for file in (ROOT / "algorithms").glob("[a-z]*.py")}
OTHERS = sorted(NAMES - {*FAST, *ALONE, "fedbn"})
METHODS = [
    *(f"{name} rounds=3" for name in FAST),
    *(pytest.param(name, marks=STEADY) for name in (*OTHERS, *WITH_OPTIONS)),
]


class Answers(InlineExecutor):
    """Remembers the calls and answers of training, and how many clients were trained together."""

    def __init__(self, setup, policy=None, device="cpu"):
        super().__init__(setup.context, setup.weights, policy, device)
        self.seen = []
        self.together = 0

    def map(self, calls):
        answers = super().map(calls)
        self.seen += [pair for pair in zip(calls, answers, strict=True) if pair[0].tag == TRAINING]
        return answers

    def _together(self, calls):
        done = super()._together(calls)
        self.together += len(calls) if done else 0
        return done


class ExactAnswers(Answers, Exact):
    """Remembers what float64 gives."""


def played(setup, group, rounds=1, policy=None, local=None, executor=None):
    """The executor after these rounds, and the tensors of the server."""
    executor = executor or Answers(setup, policy)
    changed = replace(setup.experiment, group=group, rounds=rounds, evaluate_every=0)
    experiment = changed if local is None else replace(changed, local=local)
    *_, last = run_rounds(experiment, executor, setup.start)
    return executor, last.state.params


def prepared(*overrides):
    return small_setup("data.partition.clients_per_domain=2", "data.domains=[plain,street]", *overrides)


def moved(call, update):
    return torch.cat([(v - call.sent.params[n]).flatten() for n, v in update.params.items()])


def check_agreement(setup, rounds=1, local=None):
    alone, _ = played(setup, 1, rounds, local=local)
    grouped, _ = played(setup, 3, rounds, local=local)
    with exact_numbers():
        exact, _ = played(exact_setup(setup), 1, rounds, local=local, executor=ExactAnswers(setup))
    assert grouped.together == 3 * rounds  # the fourth client is a group of one
    for (call, one), (_, other) in zip(alone.seen, grouped.seen, strict=True):
        assert call.client == one.client == other.client
        assert one.params.keys() == other.params.keys()
    moves = [[moved(*pair) for pair in each.seen] for each in (alone, grouped, exact)]
    equally_near(*moves)


@pytest.mark.parametrize("overrides", TUNINGS)
def test_updates_are_those_of_clients_that_are_trained_alone(overrides):
    check_agreement(prepared("algorithm=fedavg", *overrides.split()))


@pytest.mark.parametrize("overrides", METHODS)
def test_every_method_that_says_so_can_be_grouped(overrides):
    setup = prepared(f"algorithm={overrides.split()[0]}", "train.group=3", *overrides.split()[1:])
    assert setup.group.clients == 3
    check_agreement(setup)


def test_clients_of_different_sizes_draw_the_same_random_numbers():
    setup = prepared(
        "algorithm=fedavg", "tuning.dropout=0.5", "data.limit=40", "data.partition.scheme=dirichlet"
    )
    sizes = {info.num_examples for info in setup.experiment.clients.values()}
    assert len(sizes) > 2
    check_agreement(setup)


@pytest.mark.parametrize("group", [1, 3, 16])
def test_who_shares_a_pass_follows_from_the_calls_and_not_from_their_order(group):
    setup = prepared("algorithm=fedavg")
    cohort = make_cohort(replace(setup.experiment, group=group), Answers(setup), 0)
    sent = Broadcast(round=0, params=setup.start)
    calls = [cohort._call(cid, fit, TRAINING, sent) for cid in cohort.ids]
    names = [[calls[i].client for i in unit] for unit in units(calls)]
    assert [len(unit) for unit in names] == {1: [1] * 4, 3: [3, 1], 16: [4]}[group]
    other = [cohort._call(cid, fit, "report", sent) for cid in cohort.ids]
    assert all(len(unit) == 1 for unit in units(other))


def test_a_group_gives_the_same_bits_again():
    setup = prepared("algorithm=fedgcr")
    first, params = played(setup, 3, 2)
    assert first.together == 3 * 2
    assert digest(played(setup, 3, 2)[1]) == digest(params)


def test_a_group_does_not_depend_on_what_the_process_did_before():
    setup = prepared("algorithm=promptfl", "data.domains=[plain]")
    first, params = played(setup, 2)
    first.worker.cache.clear()
    again = replace(setup.experiment, group=2, rounds=1, evaluate_every=0)
    *_, last = run_rounds(again, first, setup.start)
    assert digest(last.state.params) == digest(params)


class Failing(Local):
    """Raises an error in the second step of one client."""

    def loss(self, client, sent, batch):
        client.store["steps"] = client.store.get("steps", 0) + 1
        if client.id.startswith("c1") and client.store["steps"] == 2:
            raise ValueError("no such image")
        return super().loss(client, sent, batch)


@pytest.mark.parametrize("policy", ["raise", "drop"])
def test_a_client_that_fails_in_a_group_is_named_and_the_others_count(policy):
    setup = prepared("algorithm=fedavg", "train.batch_size=2")
    events = []
    executor = Answers(setup, Policy(on_client_error=policy))
    executor.on_event = events.append
    experiment = replace(setup.experiment, group=4, rounds=1, evaluate_every=0, local=Failing())
    if policy == "raise":
        with pytest.raises(ClientError, match=r"c1-plain.*no such image"):
            list(run_rounds(experiment, executor, setup.start))
        return
    (done,) = run_rounds(experiment, executor, setup.start)
    assert done.ledger.missing == ["c1-plain"]
    assert [(e.client, e.action) for e in events] == [("c1-plain", "drop")]
    alone, _ = played(setup, 1, local=Failing(), policy=Policy(on_client_error="drop"))
    for (_, one), (_, other) in zip(alone.seen, executor.seen, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert digest(one.params) == digest(other.params)


class Counting(Local):
    """Asks its model for something that a client of a group does not have."""

    def loss(self, client, sent, batch):
        client.measure(parameters=len(list(client.model.parameters())))
        return super().loss(client, sent, batch)


class Meta(Local):
    """Asks for gradients of values that it gives for a pass."""

    def loss(self, client, sent, batch):
        given = {name: value.detach().requires_grad_() for name, value in client.trainable().items()}
        output = client.model.output_with(given, batch[0]).square().mean()
        torch.autograd.grad(output, list(given.values()))
        return super().loss(client, sent, batch)


@pytest.mark.parametrize(("local", "why"), [(Counting(), "'parameters'"), (Meta(), "that are given for it")])
def test_a_method_that_asks_for_more_than_a_group_offers_is_played_alone(local, why, caplog):
    _warn.cache_clear()
    setup = prepared("algorithm=fedavg")
    executor, params = played(setup, 2, local=local)
    assert executor.together == 0
    assert digest(params) == digest(played(setup, 1, local=local)[1])
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert why in told
    assert told.endswith("train.group=1 saves the attempts")


class Distilling(Local):
    """Takes gradients of a second pass, with half the values of the head."""

    def loss(self, client, sent, batch):
        given = {name: value.detach() / 2 for name, value in client.trainable().items() if "head" in name}
        assert given
        return super().loss(client, sent, batch) + client.model.output_with(given, batch[0]).square().mean()


def test_values_that_are_given_for_a_pass_get_no_gradients():
    check_agreement(prepared("algorithm=fedavg"), local=Distilling())


class Adversarial(Local):
    """Trains on images that were moved along the gradient of their loss."""

    def loss(self, client, sent, batch):
        x, y = batch
        (slope,) = torch.autograd.grad(super().loss(client, sent, (x.requires_grad_(), y)), x)
        return super().loss(client, sent, (x.detach() + slope, y))


def test_images_get_gradients_where_their_features_are_known():
    check_agreement(prepared("algorithm=fedavg", "tuning=head"), local=Adversarial())


def test_a_group_is_freed_without_a_garbage_collection():
    models = []

    class Watched(Local):
        def loss(self, client, sent, batch):
            models.append(weakref.ref(client.model))
            return super().loss(client, sent, batch)

    setup = prepared("algorithm=fedavg")
    gc.disable()
    try:
        played(setup, 2, local=Watched())
        assert models
        assert all(model() is None for model in models)
    finally:
        gc.enable()


def test_the_model_is_as_before_after_a_group():
    setup = prepared("algorithm=fedavg")
    executor, _ = played(setup, 3)
    before = {n: type(p) for n, p in executor.worker.model.named_parameters()}
    assert set(before.values()) == {torch.nn.Parameter}
    assert executor.worker.checksum() == InlineExecutor(setup.context, setup.weights).worker.checksum()
    assert all("forward" not in vars(m) for m in executor.worker.model.modules())


def test_a_group_leaves_the_global_random_states_alone():
    import random

    import numpy as np

    setup = prepared("algorithm=fedavg")
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    expected = (torch.rand(1), np.random.rand(), random.random())
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    played(setup, 3)
    assert (torch.rand(1), np.random.rand(), random.random()) == expected
