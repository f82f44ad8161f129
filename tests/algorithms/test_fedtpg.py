"""FedTPG: its prompts against NumPy, names it never saw, and its reductions to PromptFL and FedAvg."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rayfed.config.schema import load_config
from rayfed.errors import ConfigError
from rayfed.models.build import build_backbone
from rayfed.models.prompters import PromptNetwork
from rayfed.tuning.base import apply_tuning, export, load
from rayfed.tuning.prompt_network import NetworkPrompt
from rayfed.tuning.text_prompt import TextPrompt
from tests.algorithms.test_fedpgp import FEW, SMALL, rows, tuned, with_context
from tests.rounding import equally_near, exactly


def normalised(x, weights, name):
    spread = np.sqrt(x.var(1, keepdims=True) + 1e-5)
    return (x - x.mean(1, keepdims=True)) / spread * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def test_queries_attend_to_the_names():
    model = tuned(NetworkPrompt(init_std=0.3, heads=2))
    w = {name: p.detach().double().numpy() for name, p in model.text.prompter.named_parameters()}
    context = model.text.context.detach().double().numpy()
    names = normalised(rows(model.head.weight), w, "name_norm")
    given = normalised(context, w, "query_norm"), names, names
    parts = zip(given, np.split(w["attention.in_proj_weight"], 3), strict=True)
    q, k, v = (x @ part.T for x, part in parts)  # biases start as 0
    attended = []
    for half in (slice(0, 32), slice(32, 64)):
        scores = np.exp(q[:, half] @ k[:, half].T / math.sqrt(32))
        attended.append(scores / scores.sum(1, keepdims=True) @ v[:, half])
    x = np.concatenate(attended, 1) @ w["attention.out_proj.weight"].T  # the queries are not added
    values, gates = np.split(normalised(x, w, "norm") @ w["inner.weight"].T + w["inner.bias"], 2, axis=1)
    gates = np.array([[g / 2 * (1 + math.erf(g / math.sqrt(2))) for g in row] for row in gates])
    x = x + (values * gates) @ w["outer.weight"].T + w["outer.bias"]
    expected = with_context(torch.tensor(x, dtype=torch.float32))
    judge = exactly(lambda m: F.normalize(m.class_features(), dim=1), model)
    equally_near([torch.from_numpy(expected)], [torch.from_numpy(rows(model.class_features()))], [judge])
    model.class_features().square().sum().backward()
    learned = [model.text.context, *model.text.prompter.parameters()]
    assert sum(float(p.grad.abs().sum()) > 0 for p in learned) >= len(learned) - 1


@torch.no_grad()
def test_the_lengths_of_the_names_do_not_count():
    network, context, names = PromptNetwork(8, 8, 2), torch.randn(3, 8), torch.randn(4, 8)
    network.outer.weight.normal_()
    assert torch.equal(network(context, names, None), network(context, names / 1024, None))


@torch.no_grad()
def test_a_network_that_gives_one_vector_is_promptfl_and_any_network_takes_other_names():
    model = tuned(NetworkPrompt())
    other = apply_tuning(build_backbone(SMALL, ("cat", "zero"), 0), NetworkPrompt(), 1).eval()
    load(other, export(model))
    assert other.class_features().shape == (2, 64)
    assert not torch.allclose(other.class_features()[1], model.class_features()[0])  # the other names count
    network, vector = model.text.prompter, torch.randn(64)
    for last in (network.attention.out_proj, network.outer):
        last.weight.zero_()
        last.bias.zero_()
    network.outer.bias.copy_(vector)
    plain = tuned(TextPrompt(length=4))
    load(plain, {"text.context": vector.repeat(4, 1)})
    assert torch.equal(model.class_features(), plain.class_features())


def test_the_network_has_the_size_of_the_released_one():
    """4,206,080 trained numbers for ViT-B/16, whose features and embeddings have 512 numbers."""
    with torch.device("meta"):
        network = PromptNetwork(512, 512, 4)
    assert 4 * 512 + sum(p.numel() for p in network.parameters()) == 4_206_080


def test_the_released_settings():
    config = load_config(["algorithm=fedtpg"])
    assert config.model.template == "{}"
    assert (config.tuning["length"], config.tuning["heads"]) == (4, 4)


def test_it_is_fedavg_of_the_network(short):
    named = short("fedtpg", *FEW, "train.lr=0.1")
    same = ("model=clip_mini", "model.template='{}'", "tuning=prompt_network")
    plain = short("fedavg", *FEW, "train.lr=0.1", *same)
    assert named.sha256 == plain.sha256
    assert "text.prompter.attention.in_proj_weight" in named.params


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"tuning\.heads: 7 is no divisor of 64"):
        tuned(NetworkPrompt(heads=7))
