from __future__ import annotations

from importlib.resources import files

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.glyph_pool import GlyphPool
from benchmarks.pretrain import GlyphClassifier, Recipe, SkippingBlocks, main, pretrain, schedule
from rayfed.data import glyphs
from rayfed.errors import ConfigError
from rayfed.seeds import use_seed


def vit() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    with use_seed(3):
        return VisionTransformer(
            img_size=32, patch_size=8, embed_dim=64, depth=12, num_heads=4, num_classes=0
        ).eval()


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.slow
@pytest.mark.steady
def test_training_reduces_the_loss_and_is_repeatable():
    recipe = Recipe(learner=GlyphClassifier, steps=40, batch_size=32)
    params, losses = pretrain(recipe, GlyphPool(max_classes=3))
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.1
    vit().load_state_dict(params)
    short = Recipe(learner=GlyphClassifier, steps=2, batch_size=8)
    (a, _), (b, _), (c, _) = (pretrain(short, GlyphPool(max_classes=3), seed=s) for s in (0, 0, 1))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["norm.weight"], c["norm.weight"])


@pytest.mark.slow
@pytest.mark.steady
def test_the_written_file_loads_strictly(tmp_path):
    out = tmp_path / "vit.safetensors"
    for _ in range(2):  # it replaces its own file
        main(["--model", "vit_mini", "--out", str(out), "--minutes", "0.001"])
    vit().load_state_dict(load_file(out), strict=True)


def test_bad_arguments_are_named(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'vit_mini'"):
        main(["--model", "vit_min", "--out", str(tmp_path / "a.safetensors")])
    (tmp_path / "mine.safetensors").write_text("mine")
    with pytest.raises(ConfigError, match=r"--out: .*was not written by this command"):
        main(["--out", str(tmp_path / "mine.safetensors")])
    assert (tmp_path / "mine.safetensors").read_text() == "mine"
    with pytest.raises(ConfigError, match=r"--out: folder .*nowhere"):
        main(["--out", str(tmp_path / "nowhere" / "a.safetensors")])


def test_schedule():
    # 100 steps: 5 of warm-up, then half the peak in the middle of the remaining 95
    assert schedule(0, 100) == pytest.approx(0.2)
    assert schedule(4, 100) == pytest.approx(1.0)
    assert schedule(5, 100) == pytest.approx(1.0)
    assert schedule(5 + 19, 100) == pytest.approx(0.5 * (1 + np.cos(np.pi * 0.2)))
    assert schedule(99, 100) == pytest.approx(0.5 * (1 + np.cos(np.pi * 94 / 95)))


class _Add(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_blocks_are_skipped_in_training_only():
    blocks = SkippingBlocks([_Add() for _ in range(10)], rate=0.2, rng=np.random.default_rng(0))
    counts = [float(blocks(torch.zeros(()))) for _ in range(500)]
    assert np.mean(counts) == pytest.approx(8.0, abs=0.3)  # 10 * (1 - 0.2) on average
    assert min(counts) < 6
    assert max(counts) == 10
    assert float(blocks.eval()(torch.zeros(()))) == 10


def probe(net: nn.Module) -> dict[str, float]:
    """Test accuracy by domain of logistic regression on frozen features, trained on plain and fonts."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    five = glyphs.build()
    wanted = ("plain", "fonts")
    chosen = np.isin(five.domain, [five.domains.index(name) for name in wanted])
    images = torch.from_numpy(five.images[chosen]).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        features = StandardScaler().fit_transform(net(images).numpy())
    labels, domain, test = five.labels[chosen], five.domain[chosen], five.test[chosen]
    model = LogisticRegression(C=0.1, max_iter=300).fit(features[~test], labels[~test])
    rows = {name: test & (domain == five.domains.index(name)) for name in wanted}
    return {name: model.score(features[mine], labels[mine]) for name, mine in rows.items()}


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.slow
@pytest.mark.steady
def test_the_shipped_weights_are_worth_tuning():
    file = files("rayfed.models") / "weights" / "vit_mini.safetensors"
    assert len(file.read_bytes()) < 6e6
    net = vit()
    random = probe(net)
    net.load_state_dict(load_file(str(file)), strict=True)
    shipped = probe(net)
    assert all(shipped[name] > random[name] + 0.25 for name in shipped), (random, shipped)
    assert min(shipped.values()) > 0.7
