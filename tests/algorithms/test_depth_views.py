"""Models with a part of their blocks against smaller models; LoRA factors and other backbones."""

import pytest
import torch

from rayfed import simulate
from rayfed.errors import ConfigError
from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from rayfed.tuning.base import apply_tuning, export, load
from rayfed.tuning.lora import Lora
from rayfed.types import block_of
from tests.conftest import STEADY

SMALL = ["cluster=inline", "data.limit=40", "model.pretrained=false", "figures=false"]


def run(folder, name, *overrides):
    fixed = ["rounds=2", "evaluation.every=2", f"output={folder}/{name}"]
    return simulate([*SMALL, *fixed, *overrides])


def adapted(depth, **options):
    config = ModelConfig(name="vit_mini", pretrained=False, options={"depth": depth})
    return apply_tuning(build_backbone(config, 5, 0), Lora(dropout=0.0, **options), 0)


def step(model, x, y):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return export(model)


def test_a_view_on_the_resident_model_is_the_smaller_model():
    chosen = (1, 4, 5, 10)
    resident = adapted(12)
    strict = adapted(len(chosen))
    with torch.no_grad():
        for name, slot in strict.tensors().items():
            j = block_of(name)
            there = name if j is None else name.replace(f"blocks.{j}.", f"blocks.{chosen[j]}.")
            slot.tensor.copy_(resident.tensors()[there].tensor)
    x = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 2, 3])
    resident.active = chosen
    assert torch.equal(resident(x), strict(x))
    pool = step(resident, x, y)
    own = step(strict, x, y)
    mapped = {n.replace(f"blocks.{block_of(n)}.", f"blocks.{chosen[block_of(n) or 0]}."): n for n in own}
    assert pool.keys() == mapped.keys()
    assert all(torch.equal(pool[there], own[here]) for there, here in mapped.items())


def test_the_first_gradient_reaches_b_and_not_a():
    model = adapted(12)
    loss = model(torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))).pow(2).sum()
    loss.backward()
    for name, slot in model.tensors().items():
        if name.endswith("lora_A"):
            assert not slot.tensor.grad.any()
        elif name.endswith("lora_B"):
            assert slot.tensor.grad.any()


def test_the_stem_is_adapted_only_on_request():
    from peft import LoraConfig, inject_adapter_in_model

    stems = [n for n in export(adapted(2, stem=True)) if "patch_embed" in n]
    assert len(stems) == 2
    assert not [n for n in export(adapted(2)) if "patch_embed" in n]
    net = build_backbone(ModelConfig(name="vit_mini", pretrained=False), 5, 0).net
    bare = inject_adapter_in_model(LoraConfig(r=2, target_modules=["proj"]), net)
    assert sum("lora" in n and "patch_embed" in n for n, _ in bare.named_parameters()) == 2


def test_common_and_fixed_a(tmp_path):
    names = export(adapted(2, freeze_a=True))
    assert not any(n.endswith("lora_A") for n in names)
    assert any(n.endswith("lora_B") for n in names)
    model = adapted(2, freeze_a=True)
    with pytest.raises(KeyError, match="is frozen"):
        load(model, {"blocks.0.attn.proj.lora_A": torch.zeros(8, 64)})


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.parametrize(
    "agg", [["server.lora_agg=product_svd"], pytest.param(["tuning.freeze_a=true"], marks=STEADY)]
)
def test_other_ways_to_combine_factors(tmp_path, agg):
    result = run(tmp_path, "agg", "algorithm=fedra", "capacity=[12,10,8,6,3]", *agg)
    assert all(torch.isfinite(v).all() for v in result.params.values())


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "beit_base_patch16_224", "mixer_mini"])
def test_other_backbones(tmp_path, name):
    options = "{patch_size: 8, embed_dim: 32, depth: 4, num_heads: 2}"
    if name == "mixer_mini":
        options = "{patch_size: 8, embed_dim: 32, num_blocks: 4}"
    model = [f"model={name}", f"model.options={options}", "model.size=32"]
    result = run(tmp_path, name, "algorithm=fedra", "capacity=[4,3,2,2,1]", *model, "rounds=1")
    moved = {block_of(n) for n, v in result.params.items() if n.endswith("lora_B") and v.any()}
    assert moved == {0, 1, 2, 3}


def test_what_has_no_uniform_blocks_is_refused(tmp_path):
    for tuning in ("lora", "full"):
        with pytest.raises(ConfigError, match="'resnet10t' has no uniform blocks"):
            run(tmp_path, tuning, "algorithm=fedra", "model=resnet10t", "model.size=32", f"tuning={tuning}")
    with pytest.raises(ConfigError, match="capacity: 13 blocks are not possible; the backbone has 1 to 12"):
        run(tmp_path, "deep", "algorithm=fedra", "capacity=[13,1,1,1,1]")
