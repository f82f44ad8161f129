"""Gradients of a batch in parts: the same update as for the batch as a whole, or a refusal by name."""

from dataclasses import dataclass

import pytest
import torch

from rayfed import Local, Method
from rayfed.config.schema import load_config
from rayfed.engine.loop import run_rounds
from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.client import Client, backward
from rayfed.models.backbone import Backbone
from rayfed.registry import METHOD_FILES
from rayfed.testing import small_setup
from tests.conftest import quickly
from tests.rounding import equally_near, exactly_trained, near

OPTIONS = (
    *("data.domains=[plain,fonts]", "model.options={depth: 2}", "rounds=1", "evaluation.every=0"),
    *("train.batch_size=8", "train.optimizer=sgd", "train.lr=0.05"),
)
REFUSED = {
    "bgp",
    "fedclip",
    "fedkseed",
    "fedmix",
    "fft_gp",
    "fft_gp_clip",
    "fft_gp_prompt",
    "grace",
    "perfedavg",
}
"""Methods whose loss or step needs the whole batch, or that have no gradients."""

SECOND = {"fedgc", "fedgcr", "feddyn", "fedra_feddyn", "scaffold"}
"""Methods whose loss or step is another one from the second round on."""


def trained(*overrides):
    setup = small_setup(*OPTIONS, *overrides)
    *_, last = run_rounds(setup.experiment, InlineExecutor(setup.context, setup.weights), setup.start)
    return last.state.params


@pytest.mark.parametrize("name", quickly(METHOD_FILES.names()))
def test_a_method_makes_the_same_update_or_is_refused_by_name(name, monkeypatch):
    if name in REFUSED:
        with pytest.raises(
            ConfigError, match=f"train.micro_batch: 3 cannot be used .* of {name}, whose loss"
        ):
            small_setup(*OPTIONS, f"algorithm={name}", "train.micro_batch=3")
        return
    options = [f"algorithm={name}", f"rounds={1 + (name in SECOND)}"]
    tuning = load_config(options).tuning
    for scheme, key in ((tuning, "tuning.dropout"), (tuning.get("inner", {}), "tuning.inner.dropout")):
        options += [f"{key}=0"] if "dropout" in scheme else []  # parts draw other random numbers
    whole = trained(*options)
    rows = []
    run = Backbone.forward

    def note(model, x, headless=False):
        if torch.is_grad_enabled():
            rows.append(len(x))
        return run(model, x, headless)

    monkeypatch.setattr(Backbone, "forward", note)
    parts = trained(*options, "train.micro_batch=3")
    assert max(rows, default=0) <= 3
    monkeypatch.setattr(Backbone, "forward", run)
    equally_near(whole, parts, exactly_trained(small_setup(*OPTIONS, *options)))


def test_parts_have_the_weight_of_their_rows():
    weight = torch.zeros(2, requires_grad=True)
    x = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 5.0]])

    class Plain:
        def remembered_features(self, x):
            return None

    backward(Plain(), lambda batch: (batch[0] @ weight).mean(), (x, torch.zeros(3)), 2)
    # mean over three rows: (1 + 3 + 0) / 3 and 5 / 3
    near(weight.grad, torch.tensor([4 / 3, 5 / 3]), 6)  # two sums of three, three products and quotients


def test_features_that_are_known_are_not_computed_again(monkeypatch):
    calls = []
    original = Backbone.frozen_features

    def note(model, x):
        calls.append(model.remembered_features(x) is not None)
        return original(model, x)

    options = ("algorithm=fedavg", "tuning=head", "train.cache_features=true", "train.micro_batch=3")
    setup = small_setup(*OPTIONS, *options)
    executor = InlineExecutor(setup.context, setup.weights)
    batches = Client._pass

    def counted(client, split, order, size, augmented=False):
        for found in batches(client, split, order, size, augmented):
            monkeypatch.setattr(Backbone, "frozen_features", note)  # the first batch filled the cache
            yield found

    frozen = Client._frozen_features

    def filling(client, split):
        monkeypatch.setattr(Backbone, "frozen_features", original)
        return frozen(client, split)

    monkeypatch.setattr(Client, "_pass", counted)
    monkeypatch.setattr(Client, "_frozen_features", filling)
    for _ in run_rounds(setup.experiment, executor, setup.start):
        pass
    assert calls
    assert all(calls)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("algorithm=fedavg", "model=resnet10t", "model.size=32", "model.options={}", "tuning=full"),
            "with trained BatchNorm layers",
        ),
        (("algorithm=fedgcr", "tuning.prompt_mix=scramble"), "with tuning.prompt_mix=scramble"),
    ],
)
def test_what_mixes_the_rows_of_a_batch_is_refused(overrides, words):
    with pytest.raises(ConfigError) as caught:
        small_setup(*overrides, "train.micro_batch=3")
    assert f"train.micro_batch: 3 cannot be used {words}" in str(caught.value)


@dataclass(frozen=True)
class Alone(Local):
    """Computes gradients without the client's help."""

    def train(self, client, sent):
        optimizer = client.optimizer()
        for batch in client.batches():
            optimizer.zero_grad()
            self.loss(client, sent, batch).backward()
            optimizer.step()
        return client.update()


METHOD = Method(local=Alone)


def test_a_method_that_computes_gradients_itself_is_told_that_nothing_happened():
    trained(f"algorithm={__name__}:METHOD")
    with pytest.raises(ConfigError, match=r"train.micro_batch: 3 has no effect: the client half"):
        trained(f"algorithm={__name__}:METHOD", "train.micro_batch=3")
