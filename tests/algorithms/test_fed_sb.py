"""Fed-SB: its start values against gradients of the whole weights, by autograd."""

import numpy as np
import pytest
import torch

from rayfed.data.examples import Normalizer
from rayfed.data.shards import open_dataset
from rayfed.engine.loop import run_rounds
from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.passes import logits
from rayfed.models.build import build_backbone
from rayfed.models.shared_weights import attach
from rayfed.testing import DOMAINS, small_setup
from rayfed.tuning.lora import core_sites
from tests.algorithms.test_private import NOISY
from tests.rounding import near

RATE = 0.01
WHOLE = ("algorithm=fed_sb", "train.batch_size=64", "tuning.dropout=0.3", f"train.lr={RATE}", DOMAINS)
"""One batch has all examples of a client."""
FEW = ("tuning.rank=2", "tuning.alpha=6", "train.optimizer=sgd", "train.weight_decay=0.1")
SUMS = 12 * 17 * 64
"""Roundings of a gradient: images, tokens and numbers of a token, over which the sums of a layer go."""


def prepared(cache, *overrides):
    return small_setup(*WHOLE, f"data.cache={cache}", *overrides)


def gradients(setup):
    """Gradient of the loss of all training examples, of the weight of each adapted layer, by autograd."""
    context = setup.context
    model = build_backbone(context.model, context.classes, context.seed).requires_grad_(True).eval()
    dataset = open_dataset(context.shard)
    rows = np.concatenate([context.splits[cid]["train"] for cid in setup.experiment.clients])
    normalize = Normalizer(model.mean, model.std, torch.device("cpu"))
    x = normalize(torch.from_numpy(np.ascontiguousarray(dataset.images[rows])))
    y = torch.from_numpy(np.asarray(dataset.targets)[rows]).long()
    context.objective.loss(logits(model(x)), y).backward()
    weights = dict(model.named_parameters())
    tuned = context.skeleton()
    attach(tuned, setup.weights)
    values = dict(tuned.named_parameters())
    for site in core_sites(tuned):
        a, b, c = (values[name].detach().double() for name in (site.a, site.b, site.c))
        yield site, weights[f"{site.layer}.weight"].grad.double(), (a, b, c)


def test_the_product_is_the_best_approximation_of_the_first_step_of_sgd(cache):
    """By the theorem of Eckart and Young what is left has the other singular values."""
    setup = prepared(cache, *FEW)
    found = list(gradients(setup))
    assert len(found) == 8
    for site, gradient, (a, b, c) in found:
        step = -RATE * gradient
        values = torch.linalg.svdvals(step)
        left = torch.linalg.svdvals(step - site.scale * b @ c @ a)
        near(left[: len(values) - 2], values[2:], SUMS, float(values[0]))
        near(c.diagonal(), values[:2] / 3, SUMS, float(values[0]))
        near(a @ a.T, torch.eye(2), 64)
        near(b.T @ b, torch.eye(2), 64)
        assert torch.equal(c, torch.diag(c.diagonal()))
        assert values[0] > 0
    core = {name: value for name, value in setup.start.items() if name.endswith(".lora_C")}
    assert all(value.any() for value in core.values())


def test_with_adamw_the_step_is_the_sign_of_the_gradient(cache):
    """A rank as large as the layers leaves nothing out."""
    setup = prepared(cache, "train.optimizer=adamw", "tuning.rank=64")
    for site, gradient, (a, b, c) in gradients(setup):
        sure = gradient.abs() > 1e-4  # beyond eps, and beyond roundings
        assert sure.double().mean() > 0.5
        change = (site.scale * b @ c @ a)[sure]
        assert torch.equal(change.sign(), -gradient[sure].sign())
        assert change.abs() == pytest.approx(RATE, rel=0.01)


def test_the_same_start_in_every_process_and_another_with_another_seed(cache):
    one, again = prepared(cache, *FEW), prepared(cache, *FEW)
    other = prepared(cache, *FEW, "seed=1")
    assert all(np.array_equal(one.weights[name], value) for name, value in again.weights.items())
    names = [name for name in one.start if name.endswith(".lora_C")]
    assert not any(torch.equal(one.start[name], other.start[name]) for name in names)


def test_a_random_start_computes_what_the_frozen_model_does(cache):
    setup = prepared(cache, *FEW, "tuning.core_start=random")
    for _, _, (a, b, c) in gradients(setup):
        near(a @ a.T, torch.eye(2), 64)
        near(b.T @ b, torch.eye(2), 64)
        assert not c.any()


def test_noise_does_not_cover_the_gradients(cache):
    with pytest.raises(ConfigError, match=r"tuning\.core_start: .* set tuning\.core_start=random"):
        prepared(cache, *NOISY)
    prepared(cache, *NOISY, "tuning.core_start=random")


def test_frozen_factors_in_bfloat16_are_those_that_were_computed(cache):
    exact, half = prepared(cache, *FEW), prepared(cache, *FEW, "train.precision=bf16")
    names = [name for name in exact.weights if "lora_A" in name]
    for name in names:
        value = torch.from_numpy(half.weights[name].copy()).view(torch.bfloat16).float()
        product = (value @ torch.from_numpy(exact.weights[name]).T).abs()
        assert product.diagonal().min() > 0.9


def test_dropout_is_on_although_both_factors_are_frozen(small):
    plain, dropped = (small("algorithm=fed_sb", f"tuning.dropout={share}", "rounds=1") for share in (0, 0.5))
    assert plain.sha256 != dropped.sha256


def test_what_is_sent_for_the_start_is_traffic_of_the_first_round(cache):
    """A gradient of each layer from every client, then A and B to every client."""
    setup = prepared(cache, *FEW, "rounds=2")
    executor = InlineExecutor(setup.context, setup.weights)
    first, second = run_rounds(setup.experiment, executor, setup.start)
    clients = list(setup.experiment.clients)
    begin = [row for row in first.ledger.transfers if row["exchange"].startswith("core_")]
    factors = {name: setup.weights[name] for s in core_sites(setup.context.skeleton()) for name in (s.a, s.b)}
    sizes = [
        4 * setup.weights[s.b].shape[0] * setup.weights[s.a].shape[1]
        for s in core_sites(setup.context.skeleton())
    ]
    start = sum(value.nbytes for value in setup.start.values())
    shared = sum(value.nbytes for value in factors.values())
    assert begin == [
        *({"exchange": "core_start", "client": c, "down": start, "up": sum(sizes)} for c in clients),
        *({"exchange": "core_factors", "client": c, "down": shared, "up": 0} for c in clients),
    ]
    assert first.row["bytes_up"] - second.row["bytes_up"] == len(clients) * sum(sizes)
    assert prepared(cache, *FEW, "tuning.core_start=random").experiment.before == ()
