"""The U-Net and the LSTM as backbones."""

import sys

import pytest
import torch

from rayfed.errors import ConfigError
from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from rayfed.models.shared_weights import attach, dump, skeleton
from rayfed.tuning.base import apply_tuning, export, load
from rayfed.tuning.full import Full

UNET = ModelConfig(name="unet", pretrained=False, size=32, options={"width": 2})
LSTM = ModelConfig(name="char_lstm", pretrained=False, size=12, options={"hidden": 6})
SYMBOLS = torch.arange(36).view(3, 12)
IMAGES = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def test_a_unet_answers_for_every_pixel():
    model = build_backbone(UNET, 2, seed=0)
    assert model(IMAGES).shape == (3, 2, 32, 32)
    assert model(IMAGES, headless=True).shape == (3, 2, 32, 32)
    assert (model.task, model.size, model.width, model.num_classes) == ("segmentation", 32, 2, 2)
    features = model(IMAGES, headless=True)
    assert torch.equal(model.classify(features), model(IMAGES))


def test_the_unet_has_the_sizes_of_the_authors():
    model = build_backbone(ModelConfig(name="unet", pretrained=False, size=48), 2, seed=0)
    widths = [p.shape[0] for n, p in model.named_parameters() if n.endswith("convs.conv_1.conv.weight")]
    assert widths == [64, 128, 256, 512, 256, 128, 64, 32]
    assert model.width == 32
    assert not any("bias" in n and "deconv" not in n for n, _ in model.net.named_parameters())


def test_the_lstm_has_as_many_numbers_as_the_published_one():
    model = build_backbone(ModelConfig(name="char_lstm", pretrained=False), 80, seed=0)
    assert sum(p.numel() for p in model.parameters()) == 819_920
    assert model.size == 80
    bias = dict(model.net.lstm.named_parameters())
    for layer in (0, 1):
        assert (bias[f"bias_ih_l{layer}"][256:512] == 1).all()
        assert (bias[f"bias_hh_l{layer}"][256:512] == 0).all()


@pytest.mark.parametrize(("config", "x", "shape"), [(UNET, IMAGES, (3, 2, 32, 32)), (LSTM, SYMBOLS, (3, 2))])
def test_shared_weights_train_load_and_stand_in(config, x, shape):
    def build():
        return apply_tuning(build_backbone(config, 2, seed=0), Full(), 0)

    model, bare = build(), skeleton(build)
    attach(bare, dump(model))
    assert bare(x).shape == shape
    assert torch.equal(bare(x), model(x))
    params = export(model)
    load(bare, {name: value * 0 for name, value in params.items()})
    assert not bare(x).any()
    assert model(x).any()
    zeros = {model.module_name(name): value * 0 for name, value in params.items()}
    assert not torch.func.functional_call(model, zeros, (x,)).any()


def test_bad_options_are_one_line():
    with pytest.raises(ConfigError, match=r"model.size: 40 is not a multiple of 16"):
        build_backbone(ModelConfig(name="unet", pretrained=False, size=40), 2, seed=0)
    with pytest.raises(ConfigError, match=r"model.options: .*'wide'.* do not fit 'unet'"):
        build_backbone(ModelConfig(name="unet", pretrained=False, size=32, options={"wide": 3}), 2, seed=0)
    with pytest.raises(ConfigError, match=r"no weights are published for 'char_lstm'"):
        build_backbone(ModelConfig(name="char_lstm"), 2, seed=0)


def test_without_monai_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "monai.networks.nets.basic_unet", None)
    with pytest.raises(ConfigError, match=r"'unet' needs MONAI; install rayfed-sim\[segmentation\]"):
        build_backbone(UNET, 2, seed=0)
