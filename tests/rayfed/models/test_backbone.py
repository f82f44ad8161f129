import copy
import pickle

import pytest
import timm
import torch
from timm.models.mlp_mixer import MlpMixer
from torch import nn

from rayfed.errors import ConfigError
from rayfed.models.backbone import Backbone
from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from rayfed.models.named_tensors import global_name
from tests.rayfed.models.small import CLASSES, DEPTH_OPTION, NETS, TRANSFORMERS, images, small
from tests.rounding import equally_near, exactly


def untouched(kind, model):
    """timm's own model with the same weights, its classifier included."""
    name, options = NETS[kind]
    size = {} if kind == "resnet" else {"img_size": 32}
    if kind == "mixer":  # timm's names of mixers take no other shape
        net = MlpMixer(num_classes=CLASSES, **options, **size).eval()
    else:
        net = timm.create_model(name, num_classes=CLASSES, **options, **size).eval()
    state = dict(model.net.state_dict())
    classifiers = "head" if kind == "mixer" else net.default_cfg["classifier"]
    for classifier in [classifiers] if isinstance(classifiers, str) else classifiers:
        state |= {f"{classifier}.{n}": v for n, v in model.head.state_dict().items()}
    net.load_state_dict(state, strict=True)
    return net


@pytest.mark.parametrize("kind", NETS)
@torch.no_grad()
def test_outputs_equal_untouched_timm(kind):
    model, x = small(kind).eval(), images()
    ours, theirs = model(x), untouched(kind, model)(x)
    if (
        kind == "distilled"
    ):  # timm averages two logits, we classify the averaged features: equal up to rounding
        equally_near([theirs], [ours], [exactly(lambda m, x: m(x), untouched(kind, model), x)])
    else:
        assert torch.equal(ours, theirs)
    assert model.features(x).shape == (2, model.width)


@pytest.mark.parametrize("kind", TRANSFORMERS)
@torch.no_grad()
def test_active_blocks_equal_a_shallower_model(kind):
    active, x = (0, 2, 3), images()
    model = small(kind).eval()
    strict = small(kind, seed=1, **{DEPTH_OPTION.get(kind, "depth"): len(active)}).eval()
    state = {n: v for n, v in model.state_dict().items() if not n.startswith("net.blocks.")}
    for k, j in enumerate(active):
        block = model.stack.get_submodule(str(j)).state_dict()
        state |= {f"net.blocks.{k}.{n}": v for n, v in block.items()}
    strict.load_state_dict(state, strict=True)
    full = model(x)
    model.active = active
    assert torch.equal(model(x), strict(x))
    assert not torch.equal(model(x), full)
    model.active = None
    assert torch.equal(model(x), full)


def test_selecting_blocks_leaves_names_and_storage_alone():
    model = small("vit")
    before = {n: p.data_ptr() for n, p in model.named_parameters()}
    model.active = (1, 3)
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == before
    assert model.num_blocks == 4
    with pytest.raises(RuntimeError, match="cannot be indexed"):
        model.net.blocks[0]


@pytest.mark.parametrize("bad", [(), (2, 1), (1, 1), (0, 4), (-1, 2)])
def test_a_bad_selection_is_refused(bad):
    model = small("vit")
    with pytest.raises(ValueError, match="ascending, different indices from 0 to 3"):
        model.active = bad
    assert model.active == (0, 1, 2, 3)


def test_a_model_without_uniform_blocks_refuses_selection_by_name():
    model = small("resnet")
    assert model.num_blocks == 0
    assert model.active == ()
    model.active = None
    model.active = ()
    with pytest.raises(ConfigError, match="'resnet10t' has no uniform blocks"):
        model.active = (0,)


@pytest.mark.parametrize("kind", NETS)
def test_global_names_are_a_bijection(kind):
    model = small(kind)
    slots = model.tensors()
    parameters = dict(model.named_parameters())
    named = {s.path: s.tensor for s in slots.values() if not s.is_buffer}
    assert named.keys() == parameters.keys()
    assert all(named[path] is parameters[path] for path in named)
    assert {"head.weight", "head.bias"} <= slots.keys()
    assert all(slots[n].path == model.module_name(n) for n in slots)


def test_block_names_carry_the_global_index():
    slots = small("vit").tensors()
    assert slots["blocks.3.attn.proj.weight"].block == 3
    assert slots["patch_embed.proj.weight"].block is None


def test_stages_that_differ_are_not_called_blocks():
    config = ModelConfig(name="mobilenetv2_035", pretrained=False, size=32)
    model = build_backbone(config, CLASSES, 0)
    assert model.num_blocks == 0
    assert model.tensors()["stages.0.0.conv_dw.weight"].path == "net.blocks.0.0.conv_dw.weight"
    assert not any(n.startswith("blocks.") for n in model.tensors())


@pytest.mark.parametrize(
    ("module_name", "expected"),
    [
        ("net.patch_embed.proj.weight", "patch_embed.proj.weight"),
        ("net.head.norm.weight", "head.norm.weight"),
        ("net.blocks.10.mlp.fc2.base_layer.bias", "blocks.10.mlp.fc2.bias"),
        ("net.blocks.10.mlp.fc2.lora_B.other_adapter.weight", "blocks.10.mlp.fc2.lora_B"),
        ("net.patch_embed.proj.lora_A.default.weight", "patch_embed.proj.lora_A"),
        ("head.weight", "head.weight"),
    ],
)
def test_global_name(module_name, expected):
    assert global_name(module_name) == expected


def test_two_tensors_with_one_name_are_an_error():
    net = nn.Module()
    net.base_layer = nn.Module()
    net.a, net.base_layer.a = nn.Module(), nn.Module()
    net.a.lora_A, net.a.base_layer = nn.Linear(2, 2, bias=False), nn.Module()
    net.a.base_layer.lora_A = nn.Linear(2, 2, bias=False)
    with pytest.raises(RuntimeError, match=r"would both be called 'a\.lora_A'"):
        Backbone(net, nn.Linear(2, 2)).tensors()


def test_copies_have_their_own_table():
    model = small("vit")
    original = model.tensors()["head.weight"].tensor
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = twin.tensors()["head.weight"].tensor
        assert found is twin.head.weight
        assert found is not original


def test_the_table_follows_replaced_parameters():
    model = small("vit")
    model.tensors()
    model.head.weight = nn.Parameter(torch.zeros_like(model.head.weight))
    assert model.tensors()["head.weight"].tensor is model.head.weight


def test_functional_call_by_global_name():
    model, x = small("vit").eval(), images()
    zeros = {"head.weight": torch.zeros(CLASSES, 32), "head.bias": torch.arange(5.0)}
    values = {model.module_name(n): v for n, v in zeros.items()}
    out = torch.func.functional_call(model, values, (x,))
    assert torch.equal(out, torch.arange(5.0).expand(2, 5))


def test_zero_grad_drops_every_gradient():
    model = small("mixer")
    model(images()).sum().backward()
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
