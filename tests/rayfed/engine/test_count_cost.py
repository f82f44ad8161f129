"""What training costs: counted for every size of the model in an experiment, and written into the rows."""

import math
from types import SimpleNamespace

import pytest

from rayfed.engine import count_cost as counting
from rayfed.engine.count_cost import count_cost
from rayfed.engine.loop import run_rounds
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.train_config import TrainConfig
from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from rayfed.models.shared_weights import skeleton
from rayfed.testing import DOMAINS, small_setup
from rayfed.tuning.adapter import Adapter
from rayfed.tuning.base import apply_tuning
from rayfed.tuning.multimodal_adapter import MultimodalAdapter
from tests.rayfed.models.small import small


def context(model="vit"):
    return SimpleNamespace(model=model, tuning=f"tests of {model}", num_classes=5, train=TrainConfig())


@pytest.fixture(scope="module")
def model():
    return skeleton(lambda: apply_tuning(small("vit"), Adapter(bottleneck=2), 0))


def test_every_size_is_counted_and_the_model_stays_whole(model):
    cost = count_cost(model, context(), {"a": 1, "b": 3}, 4)
    assert sorted(cost.loads) == [1, 3, 4]
    head, adapter = 32 * 5 + 5, 2 * 32 * 2 + 2 + 32
    assert [cost.loads[n].trained for n in (1, 3, 4)] == [head + n * 2 * adapter for n in (1, 3, 4)]
    assert model.active == (0, 1, 2, 3)


def test_sizes_that_are_drawn_anew_are_interpolated_exactly(model):
    dynamic = count_cost(model, context(), None, 4)
    assert sorted(dynamic.loads) == [1, 4]
    every = count_cost(model, context(), {"a": 2, "b": 3}, 4)
    assert {n: dynamic.load(range(n)) for n in every.loads} == every.loads


def test_a_network_without_blocks_is_counted_whole():
    cost = count_cost(small("resnet"), context(model="resnet"), {"a": 0}, 0)
    assert list(cost.loads) == [0]
    assert cost.load(None).row > 0


def test_a_whole_model_is_counted_from_one_and_two_of_its_blocks(model):
    whole = count_cost(model, context(), {"a": 4}, 4)
    assert whole.loads == {4: count_cost(model, context(), {"a": 1, "b": 3}, 4).loads[4]}


def only_the_last_block_trained():
    model = apply_tuning(small("vit"), Adapter(bottleneck=2), 0)
    model.stack[:3].requires_grad_(False)
    return model


def beside_the_last_two_blocks():
    clip = ModelConfig(name="clip_mini", pretrained=False, options={"depth": 4})
    return apply_tuning(build_backbone(clip, ("zero", "dog"), 0), MultimodalAdapter(blocks=2, hidden=4), 0)


@pytest.mark.parametrize("make", [only_the_last_block_trained, beside_the_last_two_blocks])
def test_a_model_whose_blocks_differ_is_counted_whole(make):
    model = skeleton(make)
    whole = count_cost(model, context(model=make.__name__), {"a": 4}, 4)
    assert whole.loads == {4: count_cost(model, context(model=make.__name__), {"a": 1, "b": 4}, 4).loads[4]}


def test_a_large_model_that_cannot_run_without_values_is_not_counted(model, caplog, monkeypatch):
    """A small one is counted with zeros instead."""
    caplog.set_level("INFO")

    broken = skeleton(lambda: apply_tuning(small("vit"), Adapter(), 0))
    broken.net.norm.register_forward_hook(lambda layer, inputs, out: out * float(out.detach().sum()))
    assert count_cost(broken, context(model="broken"), {"a": 4}, 4) is not None
    monkeypatch.setattr(counting, "SMALL", 0)
    assert count_cost(broken, context(model="large and broken"), {"a": 4}, 4) is None
    assert "the operations of training are not counted" in caplog.text


def test_the_rows_have_what_the_clients_that_answered_cost():
    """A head of 64 features and 10 classes: 2 * 2 * 640 operations for each row, if features are kept."""
    setup = small_setup(
        "algorithm=fedavg", "tuning=head", "train.epochs=2", "train.batch_size=4", "evaluation.every=0"
    )
    executor = InlineExecutor(setup.context, setup.weights)
    first = next(iter(run_rounds(setup.experiment, executor, setup.start)))
    rows = 2 * sum(info.num_examples for info in setup.experiment.clients.values())
    assert first.row["flops"] == rows * 4 * 640
    assert first.row["trained_params"] == 650


@pytest.mark.parametrize(("name", "times"), [("fedavg", 1), ("ditto", 2), ("bgp", 2), ("fedra", 1)])
def test_the_rows_have_the_batches_that_clients_drew(name, times):
    """Ditto trains two models, and BGP takes two batches for a step."""
    setup = small_setup(f"algorithm={name}", "train.epochs=2", "train.batch_size=4", "rounds=1", DOMAINS)
    [only] = run_rounds(setup.experiment, InlineExecutor(setup.context, setup.weights), setup.start)
    sizes = [info.num_examples for info in setup.experiment.clients.values()]
    assert only.row["local_examples"] == times * 2 * sum(sizes)
    assert only.row["local_steps"] == times * 2 * sum(math.ceil(size / 4) for size in sizes)
    load = setup.experiment.cost.load(None)
    flops = only.row["local_steps"] * load.step + only.row["local_examples"] * load.row
    assert only.row["flops"] == flops or name == "fedra"  # whose clients hold a part of the blocks


def test_batches_of_the_personal_model_that_is_scored_are_not_counted():
    """PerFedAvg trains it for some steps before the scores."""
    counted = []
    for every in (0, 1):
        settings = ("local.personal_steps=2", "evaluation.personal=true", f"evaluation.every={every}")
        setup = small_setup("algorithm=perfedavg", *settings, "rounds=1", DOMAINS)
        [only] = run_rounds(setup.experiment, InlineExecutor(setup.context, setup.weights), setup.start)
        counted.append(only.row["local_examples"])
    assert counted[0] == counted[1] > 0
