"""FedDPA: the mixed adapters and the weights of examples against NumPy, what stays, and its reduction."""

import numpy as np
import pytest
import torch

from algorithms.feddpa import METHOD, Weights, weights
from rayfed.errors import ConfigError
from rayfed.federation.method_registry import check_task
from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from rayfed.objective import LANGUAGE_MODELING
from rayfed.testing import small_setup
from rayfed.tuning.base import apply_tuning, load, trainable
from rayfed.tuning.lora import WEIGH, Lora, mix
from tests.conftest import refused
from tests.rayfed.models.small import images
from tests.rounding import near

SMALL = ModelConfig(name="vit_mini", pretrained=False, options={"depth": 1})


def tuned():
    model = apply_tuning(build_backbone(SMALL, 3, 0), Lora(rank=2, alpha=3, personal=True), 0).eval()
    g = torch.Generator().manual_seed(1)
    load(model, {n: torch.randn(p.shape, generator=g) / 4 for n, p in trainable(model).items()})
    return model


def values(layer):
    """W, b, B A and B' A' of a layer, in float64."""
    one = [layer.base_layer.weight, layer.base_layer.bias]
    for first, second in ((layer.lora_A["default"], layer.lora_B["default"]), (layer.own_A, layer.own_B)):
        one.append(second.weight.double() @ first.weight.double())
    return [value.detach().double().numpy() for value in one]


@pytest.mark.parametrize("own", [0.0, 0.25, 1.0, [0.5, 0.0, 1.0]])
def test_a_layer_mixes_both_adapters(own):
    model = tuned()
    layer = next(m for m in model.modules() if hasattr(m, "own_A"))
    x = torch.randn(3, 4, layer.in_features, generator=torch.Generator().manual_seed(2))
    w, b, common, personal = values(layer)
    mix(model, torch.tensor(own) if isinstance(own, list) else own)
    share = np.reshape(own, (-1, 1, 1))
    rows = x.double().numpy()
    expected = rows @ w.T + b + 1.5 * ((1 - share) * (rows @ common.T) + share * (rows @ personal.T))
    near(layer(x), torch.tensor(expected).float(), 4 * layer.in_features)


def test_before_a_weight_is_set_the_own_adapter_adds_zeros_and_has_a_gradient():
    model = tuned()
    first = model(images(2))
    first.sum().backward()
    assert all(p.grad is not None for p in trainable(model).values())
    mix(model, 0.0)
    assert torch.equal(model(images(2)), first)


def test_windows_of_one_example_have_its_weight():
    model = tuned()
    layer = next(m for m in model.modules() if hasattr(m, "own_A"))
    x = torch.randn(4, 2, layer.in_features, generator=torch.Generator().manual_seed(2))
    mix(model, torch.tensor([1.0, 0.0]))
    found = layer(x)
    for own, part in ((1.0, slice(0, 2)), (0.0, slice(2, 4))):
        mix(model, own)
        near(found[part], layer(x)[part], 4 * layer.in_features)


def test_weights_are_mean_cosines_and_never_negative():
    """Against (1, 0) and (0, 2): (3, 4) has 0.6 and 0.8, (-1, 0) has -1 and 0."""
    found = weights(torch.tensor([[3.0, 4.0], [-1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]]), 0.5)
    assert found.tolist() == pytest.approx([0.35, 0])


@torch.no_grad()
def test_weights_come_from_features_of_the_own_adapter():
    model = tuned()
    x = images(4)
    vars(model)[WEIGH] = Weights(x[:1], 0.5)
    found = model(x)
    mix(model, 1.0)
    vars(model).pop(WEIGH)
    own = torch.nn.functional.normalize(model.features(x), dim=1)
    shares = 0.5 * (own @ own[0]).clamp(min=0)
    assert float(shares[0]) == pytest.approx(0.5)
    mix(model, shares)
    near(found, model(x), 4000, 4.0)
    mix(model, 0.0)
    assert (model(x) - found).abs().max() > 0.01


@pytest.mark.slow
@pytest.mark.steady
def test_the_global_adapter_is_that_of_fedit_and_the_own_one_stays(short):
    settings = ("tuning.dropout=0", "rounds=2")
    plain, dual = (short(name, *settings) for name in ("fedit", "feddpa"))
    assert dual.sha256 == plain.sha256
    for way in ("bytes_up", "bytes_down"):
        assert dual.history[way].tolist() == plain.history[way].tolist()
    loss = [run.history["loss"].tolist() for run in (plain, dual)]
    assert loss[0][0] == loss[1][0]  # no own adapter before the second round
    assert loss[0][1] != loss[1][1]


def test_what_it_cannot_work_with_is_refused():
    with pytest.raises(ConfigError, match="DualAdapters is not for language_modeling"):
        check_task(LANGUAGE_MODELING, METHOD.server(), METHOD.local())
    assert "tuning.personel" in refused("algorithm=feddpa", "tuning.personel=true")
    with pytest.raises(ConfigError, match="changes what the network computes"):
        small_setup("algorithm=feddpa", "train.graphs=true")
