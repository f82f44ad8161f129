"""FedTPG: its prompts against NumPy, names it never saw, and its reductions to PromptFL and FedAvg."""

import math

import numpy as np
import pytest
import torch

from rayfed.errors import ConfigError
from rayfed.models.build import build_backbone
from rayfed.tuning.base import apply_tuning, export, load
from rayfed.tuning.prompt_network import NetworkPrompt
from rayfed.tuning.text_prompt import TextPrompt
from tests.algorithms.test_fedpgp import FEW, SMALL, rows, tuned, with_context


def normalised(x, weights, name):
    spread = np.sqrt(x.var(1, keepdims=True) + 1e-5)
    return (x - x.mean(1, keepdims=True)) / spread * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def test_queries_attend_to_the_names():
    model = tuned(NetworkPrompt(init_std=0.3, heads=2))
    w = {name: p.detach().double().numpy() for name, p in model.text.prompter.named_parameters()}
    context = model.text.context.detach().double().numpy()
    names = normalised(model.head.weight.detach().double().numpy(), w, "name_norm")
    given = normalised(context, w, "query_norm"), names, names
    parts = zip(given, np.split(w["attention.in_proj_weight"], 3), strict=True)
    q, k, v = (x @ part.T for x, part in parts)  # biases start as 0
    attended = []
    for half in (slice(0, 32), slice(32, 64)):
        scores = np.exp(q[:, half] @ k[:, half].T / math.sqrt(32))
        attended.append(scores / scores.sum(1, keepdims=True) @ v[:, half])
    x = context + np.concatenate(attended, 1) @ w["attention.out_proj.weight"].T
    hidden = normalised(x, w, "network.0") @ w["network.1.weight"].T + w["network.1.bias"]
    hidden = np.array([[h / 2 * (1 + math.erf(h / math.sqrt(2))) for h in row] for row in hidden])
    x = x + hidden @ w["network.3.weight"].T + w["network.3.bias"]
    expected = with_context(torch.tensor(x, dtype=torch.float32))
    assert rows(model.class_features()) == pytest.approx(expected, abs=1e-5)
    model.class_features().square().sum().backward()
    learned = [model.text.context, *model.text.prompter.parameters()]
    assert sum(float(p.grad.abs().sum()) > 0 for p in learned) >= len(learned) - 1


@torch.no_grad()
def test_a_network_that_gives_zero_is_promptfl_and_any_network_takes_other_names():
    model, plain = tuned(NetworkPrompt()), tuned(TextPrompt(length=4))
    assert torch.equal(model.text.context, plain.text.context)
    other = apply_tuning(build_backbone(SMALL, ("cat", "zero"), 0), NetworkPrompt(), 1).eval()
    load(other, export(model))
    assert other.class_features().shape == (2, 64)
    assert not torch.allclose(other.class_features()[1], model.class_features()[0])  # names beside it count
    for last in (model.text.prompter.attention.out_proj, model.text.prompter.network[3]):
        last.weight.zero_()
        last.bias.zero_()
    assert torch.equal(model.class_features(), plain.class_features())


def test_it_is_fedavg_of_the_network(short):
    named = short("fedtpg", *FEW, "train.lr=0.1")
    plain = short("fedavg", *FEW, "train.lr=0.1", "model=clip_mini", "tuning=prompt_network")
    assert named.sha256 == plain.sha256
    assert "text.prompter.attention.in_proj_weight" in named.params


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"tuning\.heads: 7 is no divisor of 64"):
        tuned(NetworkPrompt(heads=7))
