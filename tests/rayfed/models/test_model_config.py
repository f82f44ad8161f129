"""A file of weights has one key; a path in the former one means the same."""

from pathlib import Path

import pytest
from safetensors.torch import save_file

from rayfed.config.schema import load_config
from rayfed.errors import ConfigError
from rayfed.experiment.plan import prepared
from tests.rayfed.models.small import small

CLIP = "model=clip_vit_b_32"


@pytest.mark.parametrize(
    ("overrides", "pretrained", "weights"),
    [
        (["model.pretrained=a.pth"], True, "a.pth"),
        (["model.pretrained=weights"], True, "weights"),
        (["model.weights=a.pth"], True, "a.pth"),
        (["model.weights=a.pth", "model.pretrained=false"], False, "a.pth"),
        (["model.pretrained=false"], False, None),
        ([CLIP], "openai", None),
        ([CLIP, "model.pretrained=laion400m_e32"], "laion400m_e32", None),
        ([CLIP, "model.pretrained=openai.bin"], True, "openai.bin"),
        ([CLIP, "model.pretrained=folder/openai"], True, "folder/openai"),
        ([CLIP, "model.weights=a.safetensors"], "openai", "a.safetensors"),
    ],
)
def test_a_path_in_pretrained_is_the_file_of_weights(overrides, pretrained, weights):
    model = load_config(["algorithm=fedavg", *overrides]).model
    assert (model.pretrained, model.weights) == (pretrained, weights and str(Path(weights).absolute()))


def test_two_different_files_are_refused():
    with pytest.raises(ConfigError, match=r"model.weights: 'a.pth' is given, and model.pretrained=b.pth too"):
        load_config(["algorithm=fedavg", "model.weights=a.pth", "model.pretrained=b.pth"])


def test_home_is_written_out(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for key in ("weights", "pretrained"):
        config = load_config(["algorithm=fedavg", f"model.{key}=~/a.pth"])
        assert config.model.weights == str(tmp_path / "a.pth")


@pytest.mark.parametrize("key", ["weights", "pretrained"])
def test_a_run_starts_from_the_file(tmp_path, key):
    net = small("vit", seed=5).net
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    options = "{patch_size: 8, embed_dim: 32, depth: 4, num_heads: 2}"
    setup = prepared(
        load_config(
            [
                *("algorithm=fedavg", "tuning=head", "model=vit_tiny_patch16_224", "model.size=32"),
                *(f"model.options={options}", f"model.{key}={tmp_path / 'net.safetensors'}", "data.limit=12"),
            ]
        )
    )
    assert (setup.weights["net.norm.weight"] == net.norm.weight.detach().numpy()).all()
    name = "net.blocks.0.attn.qkv.weight"
    assert (setup.weights[name] == net.state_dict()["blocks.0.attn.qkv.weight"].numpy()).all()


@pytest.mark.slow
@pytest.mark.steady
def test_a_tag_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match=r"model.pretrained: 'opnai' is no tag of published"):
        prepared(load_config(["algorithm=fedclip", CLIP, "model.pretrained=opnai", "data.limit=12"]))
