"""What trials share must not change a bit of what they compute."""

import pickle

import numpy as np
import pytest
import torch

from rayfed.config.schema import load_config
from rayfed.engine.built_once import digest_of
from rayfed.engine.setup import prepare
from rayfed.executors.inline import InlineExecutor
from tests.conftest import SMALL
from tune import shared
from tune.shared import JoinedWeights, join, put_frozen, sharing_features


@pytest.fixture
def store(monkeypatch):
    """An object store in this process: a reference is the value itself, read-only."""

    def put(arrays):
        for array in arrays.values():
            array.flags.writeable = False
        return arrays

    monkeypatch.setattr(shared.ray, "put", put)
    monkeypatch.setattr(shared.ray, "get", lambda ref: ref)


def overrides(cache, *more):
    return [*[text for text in SMALL if not text.startswith("tuning.")], f"data.cache={cache}", *more]


@pytest.mark.parametrize(
    "more",
    [
        ("tuning=lora",),
        ("tuning=head",),
        ("tuning=full",),
        ("tuning=visual_prompt",),
        ("tuning=gc_prompt",),
        ("tuning=exits", "tuning.every=2"),
        ("model=clip_mini", "model.pretrained=true", "model.options={}", "tuning=attention_adapter"),
        ("model=clip_mini", "model.pretrained=true", "model.options={}", "tuning=text_prompt"),
    ],
    ids=lambda more: more[-1],
)
def test_a_model_on_shared_weights_is_the_same_model(more, cache, store):
    config = load_config(overrides(cache, *more))
    plain = prepare(config)
    frozen = put_frozen([plain.world])
    (backbone,) = frozen.by_key.values()
    before = digest_of(backbone.ref)
    again = prepare(config, frozen.build)
    assert digest_of(again.weights) == digest_of(plain.weights)
    assert all(torch.equal(again.start[name], value) for name, value in plain.start.items())
    assert digest_of(backbone.ref) == before

    sent = join(again.weights, backbone)
    assert digest_of(sent) == digest_of(plain.weights)
    if "tuning=full" not in more:
        assert isinstance(sent, JoinedWeights)
        own = sum(array.nbytes for array in sent._own.values())
        assert own < 0.5 * sum(array.nbytes for array in plain.weights.values())


def test_another_model_is_built_from_its_own_weights(cache, store):
    frozen = put_frozen([prepare(load_config(overrides(cache))).world])
    other = load_config(overrides(cache, "model.options={depth: 2}"))
    assert frozen.of(prepare(other).world) is None
    assert digest_of(prepare(other, frozen.build).weights) == digest_of(prepare(other).weights)


def test_features_on_disk_are_those_of_the_worker_and_are_computed_once(cache, store):
    from rayfed.federation.client_tasks import evaluate
    from rayfed.federation.executor import Call
    from rayfed.types import Broadcast

    setup = prepare(load_config(overrides(cache, "tuning=head")))
    (backbone,) = put_frozen([setup.world]).by_key.values()
    client = next(iter(setup.experiment.clients))

    def score(on_forward=lambda *_: None):
        executor = InlineExecutor(sharing_features(setup.world, backbone), setup.weights)
        executor.worker.model.net.register_forward_hook(on_forward)
        sent = Broadcast(round=0, params=setup.start)
        return executor.map([Call(client, evaluate, "test", sent)])[0].metrics

    plain = InlineExecutor(setup.world, setup.weights)
    sent = Broadcast(round=0, params=setup.start)
    expected = plain.map([Call(client, evaluate, "test", sent)])[0].metrics
    assert score() == expected
    assert list((setup.world.shard.parent / "features").rglob("*.npy"))
    assert score(lambda *_: pytest.fail("computed again")) == expected


def test_joined_weights_travel_by_reference(store):
    weights = JoinedWeights({"x": np.zeros(1000)}, {"own": np.ones(2)}, {"net.x": "x"})
    again = pickle.loads(pickle.dumps(weights))
    assert dict(again).keys() == {"own", "net.x"}
    assert again["net.x"].shape == (1000,)
