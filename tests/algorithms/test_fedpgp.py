"""FedPGP: its loss against NumPy, what stays at the client, and its reduction to PromptFL."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from algorithms.fedpgp import FedPgp
from rayfed.config.schema import load_config
from rayfed.errors import ConfigError
from rayfed.experiment.plan import prepared
from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from rayfed.objective import Classification
from rayfed.tuning.base import apply_tuning, load
from rayfed.tuning.low_rank_prompt import LowRankPrompt
from rayfed.tuning.text_prompt import TextPrompt
from tests.rayfed.models.small import images
from tests.rounding import equally_near, exactly

SMALL = ModelConfig(name="clip_mini", pretrained=False, options={"depth": 1})
NAMES = ("zero", "dog", "alarm clock")
FEW = ("rounds=2", "data.limit=8", "data.domains=[plain,fonts]")


def tuned(tuning):
    return apply_tuning(build_backbone(SMALL, NAMES, 0), tuning, 0).eval()


def with_context(context):
    """Features of the class prompts with these vectors, as float64 rows of length 1."""
    model = tuned(TextPrompt(length=4))
    load(model, {"text.context": context})
    return rows(model.class_features())


def rows(features):
    values = features.detach().double().numpy()
    return values / np.linalg.norm(values, axis=1, keepdims=True)


def test_the_loss_is_cross_entropy_plus_the_contrast_of_the_prompts():
    model = tuned(LowRankPrompt(length=4, rank=2, init_std=0.3))
    context, u, v = (model.text.context, model.text.prompter.u, model.text.prompter.v)
    own = with_context((context + u @ v).detach())
    common = with_context(context.detach())
    fixed = rows(model.head.weight)
    x, y = images(5), torch.tensor([0, 1, 2, 2, 0])
    logits = float(model.head.scale) * rows(model.features(x)) @ own.T
    task = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(5), y])
    towards, away = (np.exp((common * other).sum(1) / 0.7) for other in (fixed, own))
    expected = task - 1.5 * np.mean(np.log(towards / (towards + away)))
    measured = {}
    told = {"objective": Classification(), "measure": measured.update}

    def compute(model, x):
        return FedPgp(mu=1.5, tau=0.7).loss(SimpleNamespace(**told, model=model), None, (x, y))

    loss = compute(model, x)
    equally_near([torch.tensor(expected)], [loss], [exactly(compute, model, x)])
    assert abs(expected - task) > 0.1
    assert set(measured) == {"contrastive_loss"}
    loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in (context, u, v))


@pytest.mark.slow
@pytest.mark.steady
def test_without_matrices_and_contrast_it_is_promptfl(short):
    common = short("promptfl", *FEW)
    alone = short("fedpgp", *FEW, "tuning.rank=0", "local.mu=0", "local.stays=[]")
    assert alone.sha256 == common.sha256


def test_the_common_prompt_travels_and_the_matrices_stay_where_clients_are_scored(short):
    own = short("fedpgp", *FEW, "train.lr=0.5")
    assert set(own.params) == {"text.context"}
    sent = 2 * 4 * own.params["text.context"].numel()
    assert own.history["bytes_up"].tolist() == [sent, sent]
    averaged = short("fedpgp", *FEW, "train.lr=0.5", "local.stays=[]")
    assert {*averaged.params} == {"text.context", "text.prompter.u", "text.prompter.v"}
    assert averaged.history["loss"].tolist() != own.history["loss"].tolist()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="needs tuning=low_rank_prompt"):
        prepared(load_config(["algorithm=fedpgp", "tuning=text_prompt"]))
    with pytest.raises(ConfigError, match=r"tuning\.class_specific: cannot be used with tuning=low_rank"):
        tuned(LowRankPrompt(class_specific=True))
