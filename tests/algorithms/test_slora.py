"""SLoRA: sparse matrices and their split against NumPy, and what is trained and sent in each stage."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from algorithms.slora import STAGE, Staged, TwoStages, split
from rayfed import Server
from rayfed.errors import ConfigError
from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from rayfed.testing import small_setup
from rayfed.tuning.base import apply_tuning
from rayfed.tuning.lora import Lora, dense, places, use_sparse
from rayfed.types import Broadcast
from tests.rounding import near

SMALL = ModelConfig(name="vit_mini", pretrained=False, options={"depth": 1})
A, B, S = (f"w.lora_{name}" for name in "ABS")


def draw(seed, *size):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_entries_have_places_of_their_own():
    at = places(6, 5, 9)
    assert at.unique().tolist() == at.tolist()
    assert int(at[-1]) < 30
    assert places(6, 5, 30).tolist() == list(range(30))
    matrix = dense(torch.arange(1.0, 10.0), 6, 5)
    assert [float(matrix[i // 5, i % 5]) for i in at.tolist()] == [*range(1, 10)]
    assert int((matrix != 0).sum()) == 9


@pytest.mark.parametrize("number", [30, 7])
def test_the_factors_are_the_best_of_their_rank(number):
    """By the theorem of Eckart and Young: the error is the rest of the singular values, by NumPy."""
    params = {A: draw(0, 2, 5), B: torch.zeros(6, 2).double(), S: draw(1, number), "head.bias": draw(2, 3)}
    found = split(params)
    matrix = np.zeros(30)
    matrix[places(6, 5, number).numpy()] = params[S].numpy()
    values = np.linalg.svd(matrix.reshape(6, 5), compute_uv=False)
    error = np.linalg.norm(matrix.reshape(6, 5) - (found[B] @ found[A]).numpy())
    near(error, np.sqrt((values[2:] ** 2).sum()), 200, 10.0, torch.float64)
    near(found[A] @ found[A].T, torch.eye(2).double(), 200, 1.0, torch.float64)
    assert not found[S].any()
    assert torch.equal(found["head.bias"], params["head.bias"])


def test_a_layer_adds_its_sparse_matrix():
    model = apply_tuning(
        build_backbone(SMALL, 3, 0), Lora(rank=2, alpha=3, sparse=True, density=0.1), 0
    ).eval()
    layer = next(m for m in model.modules() if hasattr(m, "lora_S"))
    x = draw(3, 4, layer.in_features).float()
    plain = layer(x)
    with torch.no_grad():
        layer.lora_S.copy_(draw(4, len(layer.lora_S)))
    matrix = np.zeros(layer.out_features * layer.in_features)
    assert len(layer.lora_S) == round(0.1 * len(matrix))
    matrix[places(layer.out_features, layer.in_features, len(layer.lora_S)).numpy()] = layer.lora_S.detach()
    added = x.double().numpy() @ matrix.reshape(layer.out_features, -1).T
    near(layer(x) - plain, torch.tensor(1.5 * added).float(), 4 * layer.in_features)
    use_sparse(model, False)
    assert torch.equal(layer(x), plain)


@pytest.mark.parametrize(("stage", "moving"), [(1, {S, "head.bias"}), (2, {A, B, "head.bias"})])
def test_a_step_moves_what_its_stage_trains(stage, moving):
    live = {name: nn.Parameter(torch.ones(2)) for name in (A, B, S, "head.bias")}

    def backward(loss, batch):
        sum(value.sum() for value in live.values()).backward()

    client = SimpleNamespace(trainable=lambda: live, backward=backward, clip_gradients=lambda: None)
    optimizer = torch.optim.SGD(live.values(), lr=0.5, weight_decay=1.0)
    Staged().step(client, Broadcast(round=0, params={}, shared={STAGE: stage}), None, optimizer)
    assert {name for name, value in live.items() if value.tolist() == [0, 0]} == moving
    assert all(value.tolist() == [1, 1] for name, value in live.items() if name not in moving)


@pytest.mark.parametrize(
    ("share", "rounds", "first"), [(0.5, 2, 1), (0.5, 7, 3), (0.3, 10, 3), (0.29, 100, 29), (0.1, 4, 1)]
)
def test_the_first_stage_is_a_share_of_the_rounds(share, rounds, first, monkeypatch):
    """The server passes to the second stage after that many rounds."""
    server = TwoStages(sparse_share=share)
    state = server.start({})
    stages = []
    monkeypatch.setattr(Server, "aggregate", lambda self, state, cohort, updates: state)
    for number in range(rounds):
        stages.append(state.shared[STAGE])
        state = server.aggregate(replace(state, round=number), SimpleNamespace(rounds=rounds), ())
    assert stages == [1] * first + [2] * (rounds - first)


def test_a_larger_share_than_half_is_refused():
    with pytest.raises(ConfigError, match=r"server.sparse_share"):
        small_setup("algorithm=slora", "server.sparse_share=0.6")


@pytest.mark.slow
@pytest.mark.steady
def test_each_stage_sends_what_it_trains(short):
    run = short("slora", "tuning.rank=2", "tuning.density=0.05", "rounds=4")
    plain = short("fedit", "tuning.rank=2", "rounds=1")
    entries = {name: value for name, value in run.params.items() if name.endswith("lora_S")}
    assert not any(value.any() for value in entries.values())
    factors = {name for name in plain.params if ".lora_" in name}
    assert all(run.params[name].any() for name in factors)
    first, second, third, _ = run.history["bytes_up"].tolist()
    size = [sum(run.params[name].numel() for name in names) for names in (entries, factors)]
    head = sum(value.numel() for name, value in run.params.items() if name.startswith("head."))
    assert first == second == run.history["bytes_down"].tolist()[0] == 5 * 4 * (size[0] + head)
    assert third == plain.history["bytes_up"].tolist()[0] == 5 * 4 * (size[1] + head)


@pytest.mark.slow
@pytest.mark.steady
def test_the_first_stage_learns_and_the_split_keeps_the_score_where_the_rank_allows(short, monkeypatch):
    """With all ranks the model after the split is the one before it, and the next round begins there.

    The second round has a rate of nearly 0, and changes nothing.
    """
    rate = ("train.schedule=step", "train.step_at=0.5", "train.step_factor=1e-30", "rounds=2")
    run = short("slora", "tuning.rank=64", "tuning.density=0.2", *rate)
    monkeypatch.setattr("algorithms.slora.split", lambda params: params)
    longer = short("slora", "tuning.rank=64", "tuning.density=0.2", *rate)
    for name in (name for name in longer.params if name.endswith("lora_S")):
        a, b = (run.params[name[:-1] + factor].double() for factor in "AB")
        matrix = dense(longer.params[name].double(), len(b), a.shape[1])
        assert matrix.any()
        near((b @ a).float(), matrix.float(), 400, 1.0)


@pytest.mark.parametrize("option", ["tuning.freeze_a=true", "tuning.core=true"])
def test_adapters_that_cannot_hold_the_matrix_are_refused(option):
    with pytest.raises(ConfigError, match="slora needs adapters of linear layers"):
        small_setup("algorithm=slora", option)
