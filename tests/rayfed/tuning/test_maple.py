"""MaPLe: both towers block by block, its size for CLIP ViT-B/16, and blocks that are left out."""

import pytest
import torch

from rayfed.errors import ConfigError
from rayfed.fast.shareable import why_not_joint
from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from rayfed.tuning.base import apply_tuning, trainable
from rayfed.tuning.maple import Maple
from rayfed.tuning.text_prompt import TextPrompt
from tests.algorithms.test_fedpgp import NAMES
from tests.rayfed.models.small import images
from tests.rounding import equally_near, exactly

TWO = ModelConfig(name="clip_mini", pretrained=False, options={"depth": 3})


def tuned(tuning, config=TWO):
    return apply_tuning(build_backbone(config, NAMES, 0), tuning, 0).eval()


@torch.no_grad()
def test_prompts_of_the_first_blocks_are_new_and_stay_in_the_others():
    model, x = tuned(Maple(length=3, depth=2, init_std=0.3)), images(2)
    prompts, couplings = model.net.paired.prompts, model.net.paired.couplings
    visual = model.net.visual
    tokens = visual._embeds(x)
    here = tokens.shape[1]
    for j, name in enumerate(("0", "1", "2")):
        if j < 2:
            own = prompts[j] @ couplings[j].weight.T + couplings[j].bias
            tokens = torch.cat((tokens[:, :here], own.repeat(2, 1, 1)), dim=1)
        tokens = visual.transformer.resblocks.get_submodule(name)(tokens)
    expected = visual.ln_post(tokens[:, 0]) @ visual.proj
    equally_near([expected], [model.features(x)], [exactly(lambda m, x: m.features(x), model, x)])
    visual.output_tokens = True
    with model.stack.use_change(model.net.paired.image_block):
        assert visual(x)[1].shape == (2, here - 1, 64)  # without prompts

    tower, words = model.text.tower, model.text.name_tokens
    embedded = tower.token_embedding(words)
    tokens = torch.cat((embedded[:, :1], prompts[0].repeat(3, 1, 1), embedded[:, 1:-3]), dim=1)
    tokens = tokens + tower.positional_embedding
    for j, block in enumerate(tower.transformer.resblocks):
        if j == 1:
            tokens[:, 1:4] = prompts[1]
        tokens = block(tokens, attn_mask=tower.attn_mask)
    ends = tower.ln_final(tokens)[torch.arange(3), words.argmax(-1) + 3]
    judge = exactly(lambda m: m.class_features(), model)
    equally_near([ends @ tower.text_projection], [model.class_features()], [judge])


@torch.no_grad()
def test_without_the_tuning_it_scores_as_clip_and_blocks_can_be_left_out():
    model, x = tuned(Maple()), images(2)
    plain = tuned(TextPrompt())
    shallow = tuned(Maple(depth=1, init_std=0.0))
    assert torch.equal(shallow.class_features(), tuned(TextPrompt(length=2, init_std=0.0)).class_features())
    every = model(x)
    model.active = (1, 2)
    own = model.net.paired.couplings[1](model.net.paired.prompts[1]).repeat(2, 1, 1)
    visual = model.net.visual
    tokens = torch.cat((visual._embeds(x), own), dim=1)
    tokens = model.stack.get_submodule("1")(tokens)[:, :-2]
    own = model.net.paired.couplings[2](model.net.paired.prompts[2]).repeat(2, 1, 1)
    tokens = model.stack.get_submodule("2")(torch.cat((tokens, own), dim=1))
    expected = visual.ln_post(tokens[:, 0]) @ visual.proj
    equally_near([expected], [model.features(x)], [exactly(lambda m, x: m.features(x), model, x)])
    model.active = None
    assert torch.equal(model(x), every)
    model.untuned = plain.untuned = True
    assert torch.equal(model(x), plain(x))


def test_every_parameter_learns_and_clients_are_trained_alone():
    model = tuned(Maple())
    model(images(2)).square().sum().backward()
    live = trainable(model)
    assert sorted(live) == sorted(
        ["paired.prompts", *(f"paired.couplings.{j}.{k}" for j in range(3) for k in ("weight", "bias"))]
    )
    assert all(p.grad.abs().sum() > 0 for p in live.values())
    assert "layers in common" in why_not_joint(model)


def test_size_for_clip_and_networks_without_blocks():
    with torch.device("meta"):
        big = tuned(Maple(), ModelConfig(name="open_clip/ViT-B-16-quickgelu", pretrained=False))
        assert sum(p.numel() for p in trainable(big).values()) == 9 * (2 * 512 + 512 * 768 + 768)
        with pytest.raises(ConfigError, match="changes blocks of both towers"):
            tuned(Maple(), ModelConfig(name="open_clip/RN50-quickgelu", pretrained=False))
