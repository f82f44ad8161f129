"""FedOTP: its scores against SciPy, what stays at the client, and its reduction to PromptFL."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from rayfed.errors import ConfigError
from rayfed.federation.local import Local
from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from rayfed.report.feature_map import represent
from rayfed.tuning.base import apply_tuning, load
from rayfed.tuning.text_prompt import TextPrompt
from rayfed.tuning.transport_prompt import TransportPrompt, transport
from tests.algorithms.test_fedpgp import FEW, NAMES, SMALL, rows, tuned, with_context
from tests.rayfed.models.small import images
from tests.rounding import equally_near, exactly, limit, near


def test_scores_are_cosines_with_patches_weighted_by_the_plan():
    model = tuned(TransportPrompt(length=4, init_std=0.3))
    prompts = [with_context(c.detach()) for c in (model.text.context, model.text.prompter.own)]
    visual, x = tuned(TextPrompt(length=4)).net.visual, images(2)
    with torch.no_grad():
        tokens = visual.ln_post(visual.transformer(visual._embeds(x))) @ visual.proj
    patches = np.stack([rows(own[1:]) for own in tokens])
    cosines = np.einsum("bnd,kcd->bcnk", patches, np.stack(prompts))
    plan = transport(torch.from_numpy(cosines), 0.8, 0.1, 100).numpy()
    expected = float(model.head.scale) * (plan * cosines).sum((-2, -1))
    output = model(x)
    equally_near([torch.from_numpy(expected)], [output], [exactly(lambda m, x: m(x), model, x)])
    output.square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in (model.text.context, model.text.prompter.own))
    assert np.ptp(plan, -2).max() > 0.3 / cosines.shape[2]  # a uniform plan would do as well otherwise


@pytest.mark.parametrize("gamma", [0.6, 1.0])
def test_the_plan_is_the_best_one(gamma):
    """Against a general solver of SciPy, for 4 patches and 2 prompts."""
    cosines = np.array([[0.4, 0.1], [0.3, 0.35], [-0.2, 0.0], [0.1, -0.3]])
    weight = 0.1

    def cost(flat):
        plan = np.maximum(flat.reshape(4, 2), 1e-300)
        return -(plan * cosines).sum() + weight * (plan * (np.log(plan) - 1)).sum()

    columns = {"type": "eq", "fun": lambda flat: flat.reshape(4, 2).sum(0) - gamma / 2}
    patches = {"type": "ineq", "fun": lambda flat: 0.25 - flat.reshape(4, 2).sum(1)}
    best = minimize(
        cost, np.full(8, gamma / 8), bounds=[(0, 1)] * 8, constraints=[columns, patches],
        method="SLSQP", options={"ftol": 1e-14, "maxiter": 500},
    )  # fmt: skip
    found = transport(torch.from_numpy(cosines), gamma, weight, 500).numpy()
    # The cost is strictly convex: a plan that keeps to the rules and costs no more is the best one. After 500
    # steps only roundings of the last one are left; sums of 8 entries, with five operations each.
    near(found.sum(0), np.full(2, gamma / 2), 10, precision=torch.float64)
    assert found.sum(1).max() <= 0.25 + limit(10, 0.25, torch.float64)
    assert cost(found.ravel()) <= best.fun + limit(8 * 5, 1.0, torch.float64)
    assert (found.sum(1) > 0.2499).sum() == (4 if gamma == 1 else 2)


def test_the_plan_of_unlike_pairs_is_finite():
    plan = transport(torch.tensor([[1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]), 0.5, 0.001, 50)
    near(plan, torch.tensor([[0.25, 0.0], [0.0, 0.25], [0.0, 0.0]]), 50 * 4)  # four operations in each step


@torch.no_grad()
def test_with_one_patch_and_two_equal_prompts_scores_are_those_of_promptfl():
    """One patch that is the whole image gets the whole mass."""
    plain, model = tuned(TextPrompt(length=4)), tuned(TransportPrompt(length=4, gamma=1.0))
    load(model, {"text.prompter.own": model.text.context})
    features = plain.features(images(3))
    assert torch.equal(plain.text.context, model.text.context)
    scores = plain.classify(features)
    judge = exactly(lambda m, z: m.classify(z), plain, features)
    equally_near([scores], [model.classify(features[:, None].expand(-1, 2, -1))], [judge])
    model.untuned = True
    judge = exactly(lambda m, z: m.head(z), plain, features)
    equally_near([plain.head(features)], [model(images(3))], [judge])


def test_features_of_patches_are_rows_for_the_map_of_features():
    model, batch = tuned(TransportPrompt()), (images(2), torch.tensor([0, 1]))
    client = SimpleNamespace(id="a", model=model, batches=lambda *_, **__: [batch, batch])
    found = represent(client, None, Local()).extra["features"]
    assert found.shape == (4, (1 + 16) * 64)
    assert torch.equal(found[:2], model.eval().features(batch[0]).flatten(1))


@pytest.mark.slow
@pytest.mark.steady
def test_the_common_prompt_travels_and_the_other_one_stays(short):
    own = short("fedotp", *FEW, "train.lr=0.5")
    assert set(own.params) == {"text.context"}
    averaged = short("fedotp", *FEW, "train.lr=0.5", "local.stays=[]")
    fedavg = short("fedavg", *FEW, "train.lr=0.5", "model=clip_mini", "tuning=transport_prompt")
    assert set(averaged.params) == {"text.context", "text.prompter.own"}
    assert {name: value.tolist() for name, value in averaged.params.items()} == {
        name: value.tolist() for name, value in fedavg.params.items()
    }
    assert averaged.history["loss"].tolist() != own.history["loss"].tolist()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="image tower with patches and a class token"):
        resnet = ModelConfig(name="open_clip/RN50-quickgelu", pretrained=False)
        with torch.device("meta"):
            apply_tuning(build_backbone(resnet, NAMES, 0), TransportPrompt(), 0)
    with pytest.raises(ConfigError, match=r"tuning\.class_specific: cannot be used"):
        apply_tuning(build_backbone(SMALL, NAMES, 0), TransportPrompt(class_specific=True), 0)
    with pytest.raises(ConfigError, match="this tuning has several for each class"):
        tuned(TransportPrompt()).class_features()
