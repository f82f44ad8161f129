"""The number of clients that share their passes, and the reason where they do not."""

from dataclasses import replace

import pytest

from rayfed.errors import ConfigError
from rayfed.fast.shareable import why_not_joint
from rayfed.fast.size import group_size
from rayfed.federation.local import Local
from rayfed.federation.train_config import TrainConfig
from rayfed.testing import small_setup
from rayfed.tuning.base import apply_tuning
from rayfed.tuning.full import Full
from rayfed.tuning.head import Head
from rayfed.tuning.lora import Lora
from tests.rayfed.models.small import small


def chosen(tuning, cohort=128, local=None, kind="vit", row=0, **train):
    model = apply_tuning(small(kind), tuning, 0)
    joint = why_not_joint(model)
    facts = (local or Local(), joint, model.has_frozen_features, cohort, row)
    return group_size(TrainConfig(**train), *facts)


def test_auto_groups_small_batches_and_leaves_work_for_several_actors():
    sizes = [chosen(Lora(), batch_size=size).clients for size in (2, 8, 16, 17, 32)]
    assert sizes == [32, 32, 16, 1, 1]
    assert [chosen(Lora(), cohort, batch_size=8).clients for cohort in (3, 10, 16)] == [1, 3, 4]
    assert "batch_size" in chosen(Lora(), batch_size=32).why
    assert chosen(Lora(), batch_size=32).sentence == ""


def test_a_number_is_a_wish_that_the_tuning_can_refuse():
    assert chosen(Lora(), cohort=2, group=5, batch_size=99).clients == 5
    assert chosen(Lora(), group=1).sentence == ""
    refused = chosen(Full(), group=5)
    assert (refused.clients, "type VisionTransformer" in refused.sentence) == (1, True)
    assert "computed once" in chosen(Head(), batch_size=4).why
    assert chosen(Head(), batch_size=4, cache_features=False).clients == 32


def test_auto_shares_a_pass_among_as_many_clients_as_its_operations_allow():
    sizes = [chosen(Lora(), row=row, batch_size=8).clients for row in (10**6, 10**8, 10**9, 2 * 10**10)]
    assert sizes == [32, 15, 1, 1]
    refused = chosen(Lora(), row=10**9, batch_size=8)
    assert (refused.why, refused.sentence) == ("batches of 8 are work enough for this network", "")
    assert chosen(Lora(), row=10**9, batch_size=8, group=4).clients == 4  # a number is not bounded


def test_the_operations_of_the_network_are_those_of_the_experiment(monkeypatch):
    options = ("algorithm=fedavg", "data.partition.clients_per_domain=3", "train.batch_size=2")
    setup = small_setup(*options)
    assert setup.group.clients > 1
    row = setup.experiment.cost.load(None).row
    monkeypatch.setattr("rayfed.fast.size.OPERATIONS", 3 * row)
    assert small_setup(*options).group.clients == 1


class Stepping(Local):
    def step(self, client, sent, batch, optimizer):
        raise NotImplementedError


class Grouped(Stepping):
    grouped = True


def test_a_method_with_a_step_of_its_own_is_grouped_if_it_says_so():
    assert chosen(Lora(), batch_size=4, local=Stepping()).why == "Stepping has its own step()"
    assert chosen(Lora(), batch_size=4, local=Grouped()).clients == 32


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ("algorithm=fedmix", "MeanAugmented needs second"),
        ("algorithm=fedavg tuning=full", "type VisionTransformer"),
        ("algorithm=fedavg tuning=full model=clip_mini model.options={}", "most of the model"),
        ("algorithm=fedavg train.checkpointing=true", "train.checkpointing"),
        ("algorithm=fedavg train.group=auto train.precision=bf16", "train.precision=bf16"),
        ("algorithm=fedgcr tuning.prompt_mix=scramble", "mixes the images"),
    ],
)
def test_the_header_of_a_run_says_why_clients_are_trained_one_by_one(overrides, why):
    setup = small_setup("data.domains=[plain]", "train.group=4", *overrides.split())
    assert setup.experiment.group == 1
    assert setup.group.sentence.startswith("clients are trained one by one, because")
    assert why in setup.group.sentence


def test_a_time_limit_for_one_client_excludes_groups():
    with pytest.raises(ConfigError, match=r"train\.group: 4 .*failures\.client_timeout"):
        small_setup("data.domains=[plain]", "train.group=4", "failures.client_timeout=9")
    setup = small_setup(
        "algorithm=fedavg", "data.partition.clients_per_domain=2", "failures.client_timeout=9"
    )
    assert (setup.experiment.group, replace(setup.group).clients) == (1, 1)


def test_half_precision_has_the_groups_that_the_config_asks_for():
    few = ("algorithm=fedavg", "data.domains=[plain]", "train.precision=bf16")
    assert small_setup(*few, "train.group=4").experiment.group == 4
    assert small_setup(*few, "train.group=auto").experiment.group == 1
