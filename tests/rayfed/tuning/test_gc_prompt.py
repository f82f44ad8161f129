"""Prompts by image: sizes, whose h goes where, gradients, and what is cached."""

import pytest
import torch

from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from rayfed.models.prompters import GCNet, scramble_index
from rayfed.models.shared_weights import skeleton
from rayfed.tuning.base import apply_tuning, export
from rayfed.tuning.gc_prompt import GCPrompt
from rayfed.tuning.visual_prompt import VisualPrompt
from tests.rounding import equally_near, exactly
from tests.vectors import vector

V5 = vector("fedgcr", "V5")


def make(**options):
    model = build_backbone(ModelConfig(name="vit_mini", pretrained=False, options={"depth": 3}), 10, 0)
    return apply_tuning(model, GCPrompt(**options), 0)


def images(count, seed=0):
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def test_v5_sizes():
    net = GCNet(V5.inputs["width"], V5.inputs["hidden"])
    assert sum(p.numel() for p in net.parameters()) == V5.expected["gc_net_parameters"]
    names = export(make())
    assert set(names) == {
        "prompt",
        "gc_net.inner.weight",
        "gc_net.inner.bias",
        "gc_net.outer.weight",
        "gc_net.outer.bias",
        "head.weight",
        "head.bias",
    }
    assert names["prompt"].shape == (4, 64)
    assert names["gc_net.inner.weight"].shape == (256, 64)
    assert make(hidden=7).gc_net.inner.weight.shape == (7, 64)


def test_v5_scramble():
    assert scramble_index(V5.inputs["batch"], V5.inputs["prompts"]).tolist() == V5.expected["scrambled"]
    h = torch.randn(6, 5)
    tiled = h.repeat(4, 1).reshape(6, 4, 5)  # the authors' way
    net = GCNet(5, 3, "scramble")
    assert torch.equal(net.prompts(torch.zeros(4, 5), h), tiled)
    assert torch.equal(net.eval().prompts(torch.zeros(4, 5), h), h[:, None].expand(6, 4, 5))
    assert scramble_index(1, V5.inputs["prompts"]).tolist() == V5.expected["scrambled_single"]


@pytest.mark.parametrize("classes", V5.expected["head_parameters"])
def test_v5_what_travels_of_the_papers_model(classes):
    config = ModelConfig(name="vit_base_patch16_224", pretrained=False)
    made = skeleton(lambda: apply_tuning(build_backbone(config, int(classes), 0), GCPrompt(), 0))
    sizes = {name: shared.tensor.numel() for name, shared in made.tensors().items() if shared.is_trained}
    parts = {
        part: sum(n for name, n in sizes.items() if name.startswith(part))
        for part in ("prompt", "gc_net", "head")
    }
    assert parts == {
        "prompt": V5.expected["prompt_parameters"],
        "gc_net": V5.expected["gc_net_parameters"],
        "head": V5.expected["head_parameters"][classes],
    }
    assert sum(parts.values()) == sum(sizes.values())


def test_own_h_does_not_depend_on_the_batch():
    model, x = make(), images(6)
    z, h = model.train().encode(x)
    z1, h1 = model.encode(x[2:3])
    equally_near([z1, h1], [z[2:3], h[2:3]], exactly(lambda m, x: m.encode(x), model, x[2:3]))
    equally_near([model.head(z)], [model(x)], [exactly(lambda m, x: m(x), model, x)])
    assert torch.equal(model(x, headless=True), model.features(x))
    mixed = make(prompt_mix="scramble").train()
    assert not torch.allclose(mixed.encode(x)[0][2:3], mixed.encode(x[2:3])[0], atol=1e-4)


def test_the_prompts_are_p_plus_h_and_their_place_does_not_matter():
    model, x = make(), images(2)
    z, h = model.encode(x)
    judge, _ = exactly(lambda m, x: m.encode(x), model, x)
    net = model.net
    tokens = net.norm_pre(net.patch_drop(net._pos_embed(net.patch_embed(x))))
    prompts = model.stack.prompt + h[:, None]
    for parts in ((tokens, prompts), (tokens[:, :1], prompts, tokens[:, 1:])):
        out = torch.cat(parts, dim=1)
        for block in model.stack.children():
            out = block(out)
        equally_near([net.norm(out)[:, 0]], [z], [judge])


def test_without_customisation_it_is_a_visual_prompt():
    model, plain = (
        make(),
        build_backbone(ModelConfig(name="vit_mini", pretrained=False, options={"depth": 3}), 10, 0),
    )
    plain = apply_tuning(plain, VisualPrompt(), 0)
    x = images(3)
    with torch.no_grad():
        plain.stack.prompt.copy_(model.stack.prompt)
    judge = exactly(lambda m, x: m.features(x), plain, x)
    equally_near([plain.features(x)], [model.encode(x, customize=False)[0]], [judge])
    assert not torch.allclose(model.features(x), plain.features(x), atol=1e-3)


def test_only_the_tuned_part_gets_gradients():
    model = make().train()
    model(images(4)).square().sum().backward()
    assert {n for n, s in model.tensors().items() if s.tensor.grad is not None} == set(export(model))
    assert not model.frozen_features(images(4)).requires_grad


def test_remembered_features_are_those_of_this_very_batch():
    model, x = make(), images(4)
    first = model.frozen_features(x)
    assert model.frozen_features(x).data_ptr() == first.data_ptr()
    assert torch.equal(model.frozen_features(x.clone()), first)
    assert not torch.allclose(model.frozen_features(images(4, seed=1)), first)
    model.active = (0, 2)
    assert not torch.allclose(model.frozen_features(x), first)
    x = images(4, seed=2)
    model.remember_frozen_features(x, torch.zeros(4, 64))
    assert torch.equal(model.encode(x)[1], model.gc_net(torch.zeros(4, 64)))


def test_feature_dropout_is_for_training_only():
    model, x = make(feature_dropout=0.5), images(4)
    with torch.no_grad():
        assert not torch.equal(model.train().features(x), model.features(x))
        assert torch.equal(model.eval().features(x), model.features(x))


def test_the_cache_changes_nothing(tmp_path, cache, monkeypatch):
    import rayfed
    from rayfed.executors.worker import Worker

    common = [
        "algorithm=fedgcr",
        "data.limit=40",
        "rounds=2",
        "model.options={depth: 2}",
        "model.pretrained=false",
        "figures=false",
    ]
    common += ["cluster=inline", f"data.cache={cache}"]
    cached = rayfed.simulate([*common, f"output={tmp_path / 'cached'}"])
    plain = Worker.call

    def forgetful(self, call, store):
        self.cache.clear()
        return plain(self, call, store)

    monkeypatch.setattr(Worker, "call", forgetful)
    assert rayfed.simulate([*common, f"output={tmp_path / 'forgetful'}"]).sha256 == cached.sha256


@pytest.mark.parametrize("name", ["mixer_mini"])
def test_only_transformers(name):
    from rayfed.errors import ConfigError

    model = build_backbone(ModelConfig(name=name, pretrained=False), 10, 0)
    with pytest.raises(ConfigError, match="additional tokens"):
        apply_tuning(model, GCPrompt(), 0)


def test_prompts_start_as_in_vpt():
    """Uniform within sqrt(6 / (3 * 16 * 16 + 768)) for ViT-B/16: 0.0625."""
    from types import SimpleNamespace

    from rayfed.tuning.visual_prompt import uniform_bound

    net = SimpleNamespace(patch_embed=SimpleNamespace(patch_size=(16, 16)))
    assert uniform_bound(SimpleNamespace(net=net, width=768)) == 0.0625
