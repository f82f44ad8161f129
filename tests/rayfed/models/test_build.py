import threading
import time
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from rayfed.config.compose import choices
from rayfed.errors import ConfigError
from rayfed.federation.params import digest
from rayfed.models.backbone import Backbone
from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from rayfed.objective import LANGUAGE_MODELING, objective
from tests.conftest import quickly
from tests.rayfed.models.small import CLASSES, VIT, config, images, shared, small

ROOT = Path(__file__).parents[3]


def weights(model):
    return digest(dict(model.state_dict()))


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No hub and empty caches, whatever the machine that runs this."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "torch"))
    return tmp_path


def test_random_weights_depend_on_the_seed_only():
    torch.rand(7)
    first = small("vit", seed=3)
    torch.rand(11)
    assert weights(small("vit", seed=3)) == weights(first)
    assert weights(small("vit", seed=4)) != weights(first)
    assert all(p.dtype == torch.float32 for p in first.parameters())


@pytest.mark.parametrize("kind", ["vit", "mixer"])
def test_the_head_has_pytorchs_default_initialisation(kind):
    # U(-1/sqrt(d), 1/sqrt(d)) for weight and bias; timm's own: all zero (mixer), zero bias (vit).
    head, bound = small(kind).head, 32**-0.5
    for values in (head.weight, head.bias):
        assert 0.5 * bound < values.abs().max() <= bound


def test_the_head_does_not_depend_on_the_backbone_weights(tmp_path):
    net = small("vit", seed=9).net
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    loaded = build_backbone(
        ModelConfig(**{**vars(config("vit")), "weights": str(tmp_path / "net.safetensors")}), CLASSES, 3
    )
    assert torch.equal(loaded.head.weight, small("vit", seed=3).head.weight)
    assert digest(dict(loaded.net.state_dict())) == digest(dict(net.state_dict()))


def from_file(path, **changes):
    values = {**vars(config("vit")), "weights": str(path), **changes}
    return build_backbone(ModelConfig(**values), CLASSES, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s.pop("norm.weight"),
            r"'norm.weight' is missing \(1 tensors missing, 0 .*, 0 unexpected\)",
        ),
        (lambda s: s.update(extra=torch.ones(1)), r"'extra' is unexpected \(0 .*, 1 unexpected\)"),
        (
            lambda s: s.update({"norm.bias": torch.ones(9)}),
            r"'norm.bias' has shape \(9,\), the model's has \(32,\)",
        ),
        (
            lambda s: s.update({"patch_embed.proj.weight": torch.ones(32, 3, 4, 4)}),
            r"patch_embed.*\(32, 3, 4, 4\)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path, change, message):
    state = small("vit").net.state_dict()
    change(state)
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(ConfigError, match=message):
        from_file(tmp_path / "w.safetensors")


def test_the_classifier_in_a_file_is_ignored_and_half_precision_is_widened(tmp_path):
    net = small("vit", seed=5).net
    state = {n: v.half() for n, v in net.state_dict().items()}
    torch.save(
        {"state_dict": state | {"head.weight": torch.ones(7, 32), "head.bias": torch.ones(7)}},
        tmp_path / "w.pth",
    )
    model = from_file(tmp_path / "w.pth")
    assert model.net.norm.weight.dtype == torch.float32
    assert torch.equal(model.net.blocks[1].attn.qkv.weight, state["blocks.1.attn.qkv.weight"].float())


def test_position_tables_are_resized_to_the_input(tmp_path):
    net = small("vit", seed=5).net  # 4 x 4 patches and a class token
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    model = from_file(tmp_path / "w.safetensors", size=48)  # 6 x 6
    assert model.size == 48
    assert model.net.pos_embed.shape == (1, 37, 32)
    assert torch.equal(model.net.pos_embed[:, :1], net.pos_embed[:, :1])
    assert torch.equal(model.net.patch_embed.proj.weight, net.patch_embed.proj.weight)
    assert model(images(size=48)).shape == (2, CLASSES)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "none.safetensors",
            None,
            "is not a file; give a state dict; model.pretrained=PATH is short for model.weights=PATH",
        ),
        ("w.npz", b"x", "must end with one of .safetensors, .pth, .pt, .bin"),
        ("w.safetensors", b"not a header", "is not a readable state dict"),
        ("w.pth", b"not a pickle", "is not a readable state dict"),
    ],
)
def test_unreadable_files_are_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        from_file(tmp_path / name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


class Payload:
    def __reduce__(self):
        return (Path.touch, (Path("never-made-by-a-weight-file"),))


def test_a_pickle_with_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Payload()}, tmp_path / "w.pth")
    with pytest.raises(ConfigError, match="is not a readable state dict"):
        from_file(tmp_path / "w.pth")
    assert not Path("never-made-by-a-weight-file").exists()


@pytest.mark.parametrize(
    ("name", "file"),
    [("resnet10t", "model.safetensors"), ("alexnet", "alexnet-owt-7be5be79.pth")],
)
def test_without_network_and_cache_the_error_says_what_to_do(offline, monkeypatch, name, file):
    monkeypatch.setattr(
        "rayfed.models.weight_files.PROBE_SECONDS", 1e-6
    )  # for urls, which know no offline mode
    waits, sleep, here = [], time.sleep, threading.get_ident()

    def wait(seconds):  # between the attempts of a library; other threads sleep as ever
        waits.append(seconds) if threading.get_ident() == here else sleep(seconds)

    monkeypatch.setattr("time.sleep", wait)
    with pytest.raises(ConfigError) as caught:
        build_backbone(ModelConfig(name=name), CLASSES, 0)
    assert sum(waits) < 5
    message = str(caught.value)
    assert "\n" not in message
    for part in (f"{name!r}", file, "model.weights=FILE", "model.pretrained=false"):
        assert part in message


def test_cached_hub_weights_need_no_network(offline):
    net = build_backbone(ModelConfig(name="resnet10t", pretrained=False), CLASSES, 8).net
    commit = "0" * 40
    folder = offline / "hub" / "models--timm--resnet10t.c3_in1k"
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    save_file(net.state_dict(), folder / "snapshots" / commit / "model.safetensors")
    model = build_backbone(ModelConfig(name="resnet10t"), CLASSES, 0)
    assert digest(dict(model.net.state_dict())) == digest(dict(net.state_dict()))


def test_a_model_without_published_weights_says_so():
    with pytest.raises(ConfigError, match="no weights are published for 'mixer_mini'"):
        build_backbone(ModelConfig(name="mixer_mini"), CLASSES, 0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"name": "vit_bas_patch16_224"},
            "'vit_base_patch16_224'.*Choose one that `rayfed list` shows, or any of timm",
        ),
        ({"name": "resnet50.tv"}, "'resnet50' has no weights 'tv'; choose one of: .*tv_in1k"),
        ({"name": "vit_mini", "options": {"dept": 3}}, "model.options: .*dept.*do not fit 'vit_mini'"),
        ({"name": "resnet10t", "options": {"dept": 3}}, "model.options: .*dept.*do not fit 'resnet10t'"),
        ({"name": "vit_mini", "options": {"num_heads": 5}}, "model.options: .*do not fit 'vit_mini'"),
        ({"name": "vit_mini", "size": 32, "options": {"img_size": 64}}, "set model.size only"),
        ({"name": "vit_mini", "options": {"img_size": [32, 64]}}, "set model.size only"),
    ],
)
def test_bad_configs_are_explained(values, message):
    with pytest.raises(ConfigError, match=message):
        build_backbone(ModelConfig(pretrained=False, **values), CLASSES, 0)


def test_size_and_normalisation_come_from_the_weights_unless_given():
    with torch.device("meta"):
        known = build_backbone(ModelConfig(name="vit_base_patch16_224.augreg2_in21k_ft_in1k"), CLASSES, 0)
        mine = build_backbone(
            ModelConfig(name="resnet10t", size=96, mean=(0.1,) * 3, std=(0.2,) * 3), CLASSES, 0
        )
    assert (known.size, known.mean, known.std, known.width) == (224, (0.5,) * 3, (0.5,) * 3, 768)
    assert (mine.size, mine.mean, mine.std) == (96, (0.1,) * 3, (0.2,) * 3)


def test_alexnet_by_name():
    with torch.device("meta"):
        model = build_backbone(ModelConfig(name="alexnet"), CLASSES, 0)
        out = model(torch.zeros(2, 3, 224, 224))
    assert out.shape == (2, CLASSES)
    assert (model.width, model.size) == (4096, 224)
    assert {"classifier.4.weight", "head.weight"} <= model.tensors().keys()
    assert "classifier.6.weight" not in model.tensors()


@pytest.mark.parametrize("name", quickly(choices("model"), ["clip_mini", "timm", "unet_mini", "vit_mini"]))
def test_every_config_builds(name):
    values = yaml.safe_load((ROOT / "configs" / "model" / f"{name}.yaml").read_text())
    if name == "timm":
        values["name"] = "resnet10t"
    with torch.device("meta"):
        model = build_backbone(ModelConfig(**values.get("model", values)), CLASSES, 0)
        layout = objective(model.task).layout(model.size)["input"].shape
        images = len(layout) == 3
        x = torch.zeros(1, *layout[::-1]) if images else torch.zeros(1, *layout, dtype=torch.long)
        shape = (
            (1, layout[0]) if model.task == LANGUAGE_MODELING else (1, CLASSES)
        )  # one word follows each place
        assert model(x).shape[:2] == shape


def test_the_embedded_weights_load():
    model = build_backbone(ModelConfig(name="vit_mini"), CLASSES, 0)
    assert (model.size, model.width, model.num_blocks) == (32, 64, 12)
    assert weights(model) != weights(
        build_backbone(ModelConfig(name="vit_mini", pretrained=False), CLASSES, 0)
    )
    with pytest.raises(ConfigError, match="does not fit the model"):
        build_backbone(ModelConfig(name="vit_mini", options={"depth": 6}), CLASSES, 0)


def test_real_vit_weights():
    path = shared("weights/vit12_tiny64_tinyimagenet.safetensors")
    options = {"num_heads": 6, "img_size": 64}
    model = build_backbone(
        ModelConfig(name="vit_tiny_patch16_224", weights=str(path), options=options), CLASSES, 0
    )
    assert (model.size, model.num_blocks, model.width) == (64, 12, 192)
    stored = load_file(path)
    assert torch.equal(model.net.blocks[11].mlp.fc2.weight, stored["blocks.11.mlp.fc2.weight"].float())
    assert model.net.pos_embed.dtype == torch.float32


@torch.no_grad()
def test_real_mobilenet_weights_classify_as_timm_does():
    import timm

    path = shared("weights/mobilenetv2_100_imagenet1k.safetensors")
    config = ModelConfig(name="mobilenetv2_100", weights=str(path), size=64, options={"pad_type": "same"})
    model: Backbone = build_backbone(config, 1001, 0).eval()
    reference = timm.create_model("mobilenetv2_100", pad_type="same", num_classes=1001).eval()
    state = {n: v.float() if v.is_floating_point() else v for n, v in load_file(path).items()}
    reference.load_state_dict(state)
    model.head.load_state_dict({"weight": state["classifier.weight"], "bias": state["classifier.bias"]})
    x = images(size=64)
    assert torch.equal(model(x), reference(x))
    assert model.num_blocks == 0


def test_the_same_options_reach_the_embedded_model():
    model = build_backbone(ModelConfig(name="vit_mini", pretrained=False, options=VIT), CLASSES, 0)
    assert (model.width, model.num_blocks, model.size) == (32, 4, 32)


def test_alexnet_with_batch_norm():
    """Seven norms (after each convolution and the first two linear layers), and no dropout."""
    model = build_backbone(ModelConfig(name="alexnet_bn", pretrained=False, size=64), 7, 0)
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    assert [m.num_features for m in norms] == [64, 192, 384, 256, 256, 4096, 4096]
    assert not any(isinstance(m, torch.nn.Dropout) for m in model.modules())
    # Weights and biases of torchvision's AlexNet with seven classes, and two numbers per normalised channel.
    plain = 2_469_696 + 37_752_832 + 16_781_312 + 7 * 4097
    assert sum(p.numel() for p in model.parameters()) == plain + 2 * sum(m.num_features for m in norms)
    assert (model.mean, model.std) == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    model.train()
    assert torch.isfinite(model(torch.rand(1, 3, 64, 64))).all()  # one image has no variance, and is no error
    assert model(torch.rand(2, 3, 64, 64)).shape == (2, 7)
