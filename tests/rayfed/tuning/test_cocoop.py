"""CoCoOp: its scores against NumPy and CoOp's features, and its reduction to CoOp."""

import numpy as np
import pytest
import torch

from rayfed.errors import ConfigError
from rayfed.models import clip
from rayfed.tuning.base import load
from rayfed.tuning.cocoop import CoCoOp
from rayfed.tuning.text_prompt import TextPrompt
from tests.algorithms.test_fedpgp import rows, tuned, with_context
from tests.rayfed.models.small import images
from tests.rounding import equally_near, exactly


def test_each_image_has_class_prompts_of_its_own(monkeypatch):
    model, x = tuned(CoCoOp(init_std=0.3, reduction=8)), images(4)
    net = model.text.prompter
    assert net.inner.weight.shape == (8, 64)
    features = rows(model.features(x))
    weights = {name: p.detach().double().numpy() for name, p in net.named_parameters()}
    hidden = np.maximum(features @ weights["inner.weight"].T + weights["inner.bias"], 0)
    tokens = hidden @ weights["outer.weight"].T + weights["outer.bias"]
    expected = [
        float(model.head.scale) * own @ with_context(model.text.context.detach() + torch.tensor(token)).T
        for own, token in zip(features, tokens, strict=True)
    ]
    output = model(x)
    judge = exactly(lambda m, x: m(x), model, x)
    equally_near([torch.tensor(np.array(expected))], [output], [judge])
    monkeypatch.setattr(clip, "MOST_PROMPTS", 6)  # two images at a time
    equally_near([output], [model(x)], [judge])
    output.square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in (model.text.context, *net.parameters()))


@torch.no_grad()
def test_with_a_network_that_gives_zero_it_is_coop():
    model, plain, x = tuned(CoCoOp()), tuned(TextPrompt(length=4)), images(3)
    assert torch.equal(model.text.context, plain.text.context)
    zero = {
        f"text.prompter.outer.{kind}": torch.zeros(size) for kind, size in (("weight", (64, 4)), ("bias", 64))
    }
    assert not torch.allclose(model(x), plain(x), atol=1e-3)
    load(model, zero)
    equally_near([plain(x)], [model(x)], [exactly(lambda m, x: m(x), plain, x)])


def test_it_is_refused_where_there_is_no_image():
    with pytest.raises(ConfigError, match="or others for each image"):
        tuned(CoCoOp()).class_features()
