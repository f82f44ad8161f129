import sys
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from rayfed.errors import ConfigError
from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from rayfed.tuning.base import TUNINGS, apply_tuning, export, trainable
from rayfed.tuning.ia3 import IA3
from rayfed.tuning.lora import Lora
from rayfed.tuning.visual_prompt import VisualPrompt
from tests.rayfed.models.small import images, small
from tests.rounding import equally_near, exactly, near

ROOT = Path(__file__).parents[3]


def on_meta(name, tuning):
    with torch.device("meta"):
        model = build_backbone(ModelConfig(name=name), 100, 0)
    return apply_tuning(model, tuning, 0)


def count(params):
    return sum(p.numel() for p in params)


@pytest.mark.parametrize(
    ("name", "tuning", "expected"),
    [
        # ViT-B/16: per block 8*(768+768) + 8*(3072+768) = 43,008; mixer 8*(384+196) + 8*(3072+768) = 35,360.
        ("vit_base_patch16_224.augreg2_in21k_ft_in1k", Lora(), 516_096),
        ("mixer_b16_224.goog_in21k_ft_in1k", Lora(), 424_320),
        # The patch embedding: A 8*3*16*16 = 6,144, B 768*8 = 6,144.
        ("vit_base_patch16_224.augreg2_in21k_ft_in1k", Lora(stem=True), 528_384),
        ("vit_base_patch16_224.augreg2_in21k_ft_in1k", Lora(sites=("l0",)), 12 * 12_288),
        ("mixer_b16_224.goog_in21k_ft_in1k", Lora(sites=("l1",), rank=4), 12 * 15_360),
    ],
)
def test_lora_parameter_counts(name, tuning, expected):
    model = on_meta(name, tuning)
    adapters = {n: p for n, p in trainable(model).items() if not n.startswith("head.")}
    assert count(adapters.values()) == expected
    assert count(model.head.parameters()) == 76_900
    assert any(n.startswith("patch_embed") for n in adapters) == tuning.stem
    assert all(p.is_meta for p in model.parameters())


def test_block_and_backbone_counts_of_vit_b():
    model = on_meta("vit_base_patch16_224.augreg2_in21k_ft_in1k", Lora())
    frozen = {n: s.tensor.numel() for n, s in model.tensors().items() if not s.is_trained}
    assert sum(v for n, v in frozen.items() if n.startswith("blocks.0.")) == 7_087_872
    assert sum(v for n, v in frozen.items() if not n.startswith("blocks.")) == 744_192


def test_a_regular_expression_leaves_the_patch_embedding_alone():
    pattern = Lora(sites=(r"attn\.proj",)).pattern(small("vit"))
    assert pattern == r"blocks\.\d+\.(attn\.proj)"
    model = apply_tuning(small("vit"), Lora(rank=2, sites=(r"attn\.(qkv|proj)",), train_head=False), 0)
    assert {n.split(".", 2)[2] for n in trainable(model)} == {
        f"attn.{layer}.lora_{m}" for layer in ("qkv", "proj") for m in "AB"
    }


@torch.no_grad()
def test_lora_is_the_equation():
    # y = W x + b + alpha / rank * B A x, here 6 / 2 = 3 times.
    model = apply_tuning(small("vit"), Lora(rank=2, alpha=6.0, sites=("l1",)), 0).eval()
    layer = model.stack.get_submodule("0").mlp.fc2
    a, b = (trainable(model)[f"blocks.0.mlp.fc2.lora_{m}"] for m in "AB")
    b.copy_(torch.rand_like(b))
    x = torch.rand(3, layer.in_features)
    near(layer(x), layer.base_layer(x) + 3 * x @ a.T @ b.T, layer.in_features + 2 + 4)


def test_lora_start_values():
    # Kaiming-uniform with a = sqrt(5): U(-1/sqrt(d_in), 1/sqrt(d_in)); B = 0.
    start = export(apply_tuning(small("vit"), Lora(rank=8), 0))
    for site, width in (("attn.proj", 32), ("mlp.fc2", 128)):
        a, b = (start[f"blocks.2.{site}.lora_{m}"] for m in "AB")
        assert a.shape == (8, width)
        assert 0.9 * width**-0.5 < a.abs().max() <= width**-0.5
        assert not b.any()


@pytest.mark.parametrize(
    ("kind", "tuning", "message"),
    [
        ("vit", Lora(sites=("fc2",)), "'fc2' matches no linear layer.*attn.qkv, attn.proj, mlp.fc1, mlp.fc2"),
        (
            "mixer",
            Lora(sites=("attn.proj",)),
            "query_value, all_linear or from: mlp_tokens.fc1, mlp_tokens.fc2",
        ),
        ("vit", Lora(sites=("(",)), "is not a regular expression"),
        ("vit", Lora(sites=()), "tuning.sites: is empty"),
        ("resnet", Lora(), "'resnet10t' has no uniform blocks"),
        ("mixer", Lora(stem=True), "tuning.stem: 'mixer_mini' has no patch_embed.proj"),
        ("mixer", VisualPrompt(), "one weight per position"),
        ("resnet", VisualPrompt(), "only timm's VisionTransformer and Beit"),
    ],
)
def test_schemes_say_why_they_do_not_fit(kind, tuning, message):
    with pytest.raises(ConfigError, match=message) as caught:
        apply_tuning(small(kind), tuning, 0)
    assert "\n" not in str(caught.value)


def test_prompts_do_not_fit_relative_positions():
    with pytest.raises(ConfigError, match="table of relative positions"):
        apply_tuning(small("beit", use_rel_pos_bias=True), VisualPrompt(), 0)


def reference_with_prompts(net, prompt, x):
    """VPT-shallow by hand, the prompts between class token and patches as in the paper."""
    tokens = net._pos_embed(net.patch_embed(x))
    tokens = torch.cat((tokens[:, :1], prompt.expand(len(x), -1, -1), tokens[:, 1:]), dim=1)
    for block in net.blocks.children():
        tokens = block(tokens)
    return net.norm(tokens)[:, 0]


@torch.no_grad()
def test_prompts_equal_the_papers_forward():
    model = apply_tuning(small("vit"), VisualPrompt(num_prompts=3, init_std=1.0), 0).eval()
    prompt = trainable(model)["prompt"]
    assert prompt.shape == (3, 32)
    features = model.features(images())
    expected = reference_with_prompts(model.net, prompt, images())
    equally_near([expected], [features], [exactly(lambda m, x: m.features(x), model, images())])
    assert not torch.allclose(features, small("vit").eval().features(images()), atol=1e-2)


@torch.no_grad()
def test_prompts_are_not_pooled():
    # Without class token all 16 tokens are pooled, and they are all that is left.
    model = apply_tuning(small("vit", global_pool="avg", class_token=False), VisualPrompt(init_std=1.0), 0)
    assert model.net.forward_features(images()).shape == (2, 16, 32)


@pytest.mark.parametrize("kind", ["vit", "beit", "distilled"])
def test_prompts_work_in_sub_models(kind):
    options = {"use_rel_pos_bias": False, "use_abs_pos_emb": True} if kind == "beit" else {}
    model = apply_tuning(small(kind, **options), VisualPrompt(init_std=1.0), 0)
    model.active = (1, 2)
    model(images()).sum().backward()
    assert trainable(model).keys() == {"prompt", "head.weight", "head.bias"}
    assert trainable(model)["prompt"].grad.abs().sum() > 0


def test_prompt_start_values():
    model = apply_tuning(small("vit", embed_dim=128), VisualPrompt(num_prompts=100, init_std=0.5), 0)
    assert trainable(model)["prompt"].std().item() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("lora", {"rank": 0}),
        ("lora", {"dropout": 1.0}),
        ("lora", {"alpha": 0}),
        ("visual_prompt", {"num_prompts": 0}),
    ],
)
def test_ranges_are_checked_when_a_config_is_read(name, values):
    with pytest.raises(ValidationError):
        TypeAdapter(TUNINGS.load(name)).validate_python(values)


def test_peft_is_imported_with_values(tmp_path, monkeypatch):
    """Transformers 5.12, which PEFT imports, reads a tensor while it is imported."""
    (tmp_path / "peft.py").write_text("import torch\ntorch.ones(1).item()\nraise OSError('read')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "peft"]:
        monkeypatch.delitem(sys.modules, name)
    with torch.device("meta"), pytest.raises(OSError, match="read"):
        IA3().apply(small("vit"))
