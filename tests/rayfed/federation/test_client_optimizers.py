"""The state of optimizers goes from visit to visit, tensor by tensor, for every method."""

import pytest
import torch
from torch import nn

from rayfed.config.schema import load_config
from rayfed.engine.loop import run_rounds
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.client import OPTIMIZERS, resume, states_of
from rayfed.federation.passes import PLAIN
from rayfed.federation.train_config import TrainConfig
from rayfed.testing import repeats_itself_after_an_interruption, small_setup

KINDS = ("sgd", "adam", "adamw")


def steps(optimizer, params, num):
    for number in range(num):
        optimizer.zero_grad()
        sum((p * (number + 1)).square().sum() for p in params.values()).backward()
        optimizer.step()


def named():
    return {name: nn.Parameter(torch.linspace(1, 2, n)) for name, n in (("a", 3), ("b", 2))}


@pytest.mark.parametrize("kind", KINDS)
def test_two_visits_of_two_steps_are_one_of_four(kind):
    config = TrainConfig(optimizer=kind, lr=0.1)
    whole, parts = named(), named()
    optimizer = PLAIN.optimizer(config, whole.values())
    first = PLAIN.optimizer(config, parts.values())
    steps(optimizer, whole, 2)
    steps(first, parts, 2)
    kept = states_of(first, parts)
    second = PLAIN.optimizer(config, parts.values())
    resume(second, parts, kept)
    before = {name: {key: value.clone() for key, value in state.items()} for name, state in kept.items()}
    steps(optimizer, whole, 2)
    steps(second, parts, 2)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    for name, state in before.items():  # what was kept is not written to by the next visit
        assert all(torch.equal(value, kept[name][key]) for key, value in state.items())


def test_a_tensor_that_is_not_held_begins_without_state_and_another_rate_is_kept():
    params = named()
    first = PLAIN.optimizer(TrainConfig(lr=0.1), params.values())
    steps(first, params, 1)
    only = {"b": params["b"], "c": nn.Parameter(torch.ones(2))}
    second = PLAIN.optimizer(TrainConfig(lr=0.3), only.values())
    resume(second, only, states_of(first, params))
    assert second.param_groups[0]["lr"] == 0.3
    assert set(states_of(second, only)) == {"b"}


def stores_after(*overrides):
    setup = small_setup(*overrides)
    executor = InlineExecutor(setup.context, setup.weights)
    rows = [done.state.params for done in run_rounds(setup.experiment, executor, setup.start)]
    return {client: kept.value.get(OPTIMIZERS, {}) for client, kept in executor.stores().items()}, rows


OPTIONS = ("data.domains=[plain,fonts]", "evaluation.every=0", "model.options={depth: 2}")


def test_momentum_is_used_in_the_next_round_and_not_without_the_option():
    common = ("algorithm=fedavg", *OPTIONS)
    plain, first = stores_after(*common)
    kept, second = stores_after(*common, "train.keep_optimizer=true")
    name = "head.weight"
    assert not any(plain.values())
    assert torch.equal(first[0][name], second[0][name])
    assert not torch.equal(first[1][name], second[1][name])
    assert all(set(states["0"]) >= {name} for states in kept.values())


def test_blocks_that_a_client_does_not_hold_keep_their_state():
    kept, _ = stores_after(
        *("algorithm=fedra", *OPTIONS, "rounds=3", "model.options={depth: 4}", "capacity=[2,2]"),
        "train.keep_optimizer=true",
    )
    held = {int(name.split(".")[1]) for name in next(iter(kept.values()))["0"] if name.startswith("blocks.")}
    assert len(held) > 2  # two blocks in each of three rounds, drawn anew


def test_a_personal_model_that_is_only_scored_changes_nothing():
    common = ("algorithm=perfedavg", *OPTIONS, "train.keep_optimizer=true", "rounds=3")
    _, seldom = stores_after(*common, "evaluation.every=0")
    _, often = stores_after(*common, "evaluation.every=1", "evaluation.personal=true")
    assert all(torch.equal(value, often[-1][name]) for name, value in seldom[-1].items())


@pytest.mark.parametrize("name", ["ditto", "fedgcr", "fedra"])
def test_an_interrupted_run_continues_with_its_moments(name):
    repeats_itself_after_an_interruption(name, ("train.keep_optimizer=true", "train.optimizer=adam"))


def test_fedgcr_keeps_its_optimizer_as_its_authors_do():
    assert load_config(["algorithm=fedgcr", "experiment=fedgcr/authors"]).train.keep_optimizer
