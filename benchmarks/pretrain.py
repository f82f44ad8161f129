"""Pre-train the embedded backbones on glyphs that are not digits: python -m benchmarks.pretrain --help.

Layer skipping follows Fan et al., Reducing transformer depth on demand with structured dropout, 2020,
section 3, so that the backbone still classifies when a client holds only some of its blocks.
"""

from __future__ import annotations

import argparse
import logging
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.glyph_pool import Captioner, GlyphPool, PoolStyle
from rayfed.errors import ConfigError, unknown
from rayfed.models import clip
from rayfed.seeds import derive, generator, use_seed
from rayfed.terminal.console import say
from rayfed.types import Params
from rayfed.user_files import check_own

log = logging.getLogger(__name__)

_LOG_EVERY = 50
_WARM_UP = 0.05
_LARGEST_SCALE = 100.0
_TIMED_STEPS = 10


class Learner(nn.Module):
    """A network with its pre-training loss; the base of one class per kind of backbone."""

    def forward(self, images: Tensor, labels: Tensor, kinds: Tensor) -> Tensor:
        """Loss of a batch of the pool, a scalar.

        Args:
            images: Shape (n, 3, 32, 32), in [-1, 1].
            labels: Classes, shape (n,).
            kinds: Kind of the background, shape (n,); see `GlyphPool.described_batch`.
        """
        raise NotImplementedError

    def export(self) -> Params:
        """The tensors to save: those of the backbone, by the names of its library."""
        raise NotImplementedError


class SkippingBlocks(nn.Sequential):
    """Blocks of which each training step skips some at random; state dict names are those of nn.Sequential.

    The probability to skip a block is drawn for each step from [0, 2 * rate], so that training covers the
    whole network and networks with few blocks.
    """

    def __init__(self, blocks: Sequence[nn.Module], rate: float, rng: np.random.Generator) -> None:
        super().__init__(*blocks)
        self.rate = rate
        self.rng = rng

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.rng.random(len(self)) < self.rng.uniform(0, 2 * self.rate)
        for block, skip in zip(self, skipped, strict=True):
            if not (skip and self.training):
                x = block(x)
        return x


class GlyphClassifier(Learner):
    """A timm vision transformer that is trained to classify glyphs."""

    def __init__(self, num_classes: int, rng: np.random.Generator, layer_skip: float = 0.2) -> None:
        super().__init__()
        from timm.models.vision_transformer import VisionTransformer

        self.backbone = VisionTransformer(
            img_size=32,
            patch_size=8,
            embed_dim=64,
            depth=12,
            num_heads=4,
            mlp_ratio=4,
            num_classes=0,
            weight_init="jax",
        )
        self.backbone.blocks = SkippingBlocks(list(self.backbone.blocks), layer_skip, rng)
        self.head = nn.Linear(64, num_classes)

    def forward(self, images: Tensor, labels: Tensor, kinds: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.backbone(images)), labels, label_smoothing=0.1)

    def export(self) -> Params:
        return {name: value.detach().clone() for name, value in self.backbone.state_dict().items()}


class CaptionMatcher(Learner):
    """An open_clip model that is trained with CLIP's loss to match pictures and captions.

    The image tower starts with the weights of vit_mini. Pictures with equal captions are not negatives of
    each other: the loss counts a caption that occurs several times as one target.
    """

    def __init__(self, num_classes: int, rng: np.random.Generator) -> None:
        super().__init__()
        self.clip: Any = clip.mini()
        load_vit(self.clip.visual, _packaged("vit_mini.safetensors"))
        self.captioner = Captioner(rng)

    def forward(self, images: Tensor, labels: Tensor, kinds: Tensor) -> Tensor:
        tokens, row = torch.unique(self.captioner(labels, kinds), dim=0, return_inverse=True)
        pictures = F.normalize(self.clip.encode_image(images), dim=-1)
        texts = F.normalize(self.clip.encode_text(tokens), dim=-1)
        scores = self.clip.logit_scale.exp().clamp(max=_LARGEST_SCALE) * pictures @ texts.T
        count = torch.bincount(row, minlength=len(tokens))
        # log n, because a caption that occurs n times would fill n columns of the score matrix.
        by_picture = F.cross_entropy(scores + count.log(), row)
        by_text = -(F.log_softmax(scores, dim=0)[torch.arange(len(row)), row]).mean()
        return (by_picture + by_text) / 2

    def export(self) -> Params:
        state = {name: value.detach().clone() for name, value in self.clip.state_dict().items()}
        return state | {"logit_scale": state["logit_scale"].clamp(max=math.log(_LARGEST_SCALE))}


def load_vit(visual: Any, state: Params) -> None:
    """Copy the weights of a timm vision transformer into an open_clip one of the same size.

    Both then compute the same features. The bias of timm's patch embedding is added to the position embedding
    of the patches. The projection to the common feature space, which timm does not have, is set to the
    identity.

    Args:
        visual: Image tower of an open_clip model.
        state: State dict of the timm model without classifier.
    """
    state = {name: value.clone() for name, value in state.items()}
    position = state.pop("pos_embed")[0]
    position[1:] += state.pop("patch_embed.proj.bias")
    new = {"positional_embedding": position, "class_embedding": state.pop("cls_token")[0, 0]}
    new["proj"] = torch.eye(len(new["class_embedding"]))
    renamed = {
        "patch_embed.proj.": "conv1.", "norm.": "ln_post.", "blocks.": "transformer.resblocks.",
        "norm1.": "ln_1.", "norm2.": "ln_2.", "attn.qkv.": "attn.in_proj_", "attn.proj.": "attn.out_proj.",
        "mlp.fc1.": "mlp.c_fc.", "mlp.fc2.": "mlp.c_proj.",
    }  # fmt: skip
    for name, value in state.items():
        for old, now in renamed.items():
            name = re.sub(rf"(^|\.){re.escape(old)}", rf"\g<1>{now}", name)
        new[name] = value
    visual.load_state_dict(new)


def _packaged(name: str) -> Params:
    from safetensors.torch import load

    return load((files("rayfed.models") / "weights" / name).read_bytes())


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Network, loss and hyperparameters of one pre-training.

    Attributes:
        learner: Builds the network from the number of classes and a generator for its random choices.
        steps: Optimizer steps unless `minutes` chooses another number.
        batch_size: Pictures per step.
        lr: Peak learning rate of AdamW; warm-up over the first 5 % of the steps, then a cosine to zero.
        weight_decay: Weight decay of matrices; vectors have none.
        eased: Share of the steps over which the distortion of pictures grows to its full strength.
    """

    learner: Callable[[int, np.random.Generator], Learner]
    steps: int = 9000
    batch_size: int = 128
    lr: float = 2e-3
    weight_decay: float = 0.05
    eased: float = 0.4


RECIPES = {
    "vit_mini": Recipe(learner=GlyphClassifier),
    "clip_mini": Recipe(learner=CaptionMatcher, steps=2106, lr=1e-3, eased=0.1),
}
"""Recipes by model name."""


def pretrain(
    recipe: Recipe, pool: GlyphPool, seed: int = 0, minutes: float | None = None
) -> tuple[Params, list[float]]:
    """Train a network from scratch on batches that the pool draws.

    The same seed and number of steps give the same weights on the same kind of processor.

    Args:
        recipe: Network and optimization.
        pool: Source of batches.
        seed: Seed of the initial weights, the batches and the layer skipping.
        minutes: Instead of the recipe's number of steps, take as many as fit into this time; their duration
            is measured on the first steps.

    Returns:
        The tensors of the backbone by name, and the loss of every step.
    """
    with use_seed(derive(seed, "pretrain", "init")):
        learner = recipe.learner(len(pool.classes), generator(seed, "pretrain", "learner")).train()
    optimizer = torch.optim.AdamW(_decay_groups(learner, recipe.weight_decay), lr=recipe.lr)
    rng = generator(seed, "pretrain", "batches")
    losses: list[float] = []
    total = recipe.steps
    step = 0
    start = timed_from = time.perf_counter()
    while step < total:
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * schedule(step, total)
        style = PoolStyle().eased(min(1.0, step / (recipe.eased * total)))
        images, labels, kinds = pool.described_batch(recipe.batch_size, rng, style)
        loss = learner(images * 2 - 1, labels, kinds)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        step += 1
        if step == _TIMED_STEPS:
            timed_from = (
                time.perf_counter()
            )  # not from the start: the first steps allocate memory and are slower
        if minutes is not None and step == 2 * _TIMED_STEPS:
            total = max(step, round(minutes * 60 * _TIMED_STEPS / (time.perf_counter() - timed_from)))
        if step % _LOG_EVERY == 0 or step == total:
            recent = sum(losses[-_LOG_EVERY:]) / len(losses[-_LOG_EVERY:])
            log.info("step %d/%d  loss %.3f  %.0f s", step, total, recent, time.perf_counter() - start)
    return learner.eval().export(), losses


def schedule(step: int, total: int) -> float:
    """Fraction of the peak learning rate at a step from 0: linear warm-up, then a cosine to zero."""
    warm_up = max(1, round(_WARM_UP * total))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, total - warm_up)))


def _decay_groups(learner: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    matrices = [p for p in learner.parameters() if p.ndim > 1]
    vectors = [p for p in learner.parameters() if p.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Pre-train one model and write its weights."""
    from safetensors.torch import save_file

    parser = argparse.ArgumentParser(prog="python -m benchmarks.pretrain", description=main.__doc__)
    parser.add_argument("--model", default="vit_mini", help=f"one of: {', '.join(sorted(RECIPES))}")
    parser.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--minutes", type=float, help="take about this long instead of the recipe's steps")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.model not in RECIPES:
        raise ConfigError(unknown("--model", options.model, RECIPES))
    if not options.out.parent.is_dir():
        raise ConfigError(f"--out: folder {str(options.out.parent)!r} does not exist; create it first")
    check_own("--out", options.out, f'"model":"{options.model}"')
    torch.set_num_threads(1)
    recipe = RECIPES[options.model]
    params, losses = pretrain(recipe, GlyphPool(), seed=options.seed, minutes=options.minutes)
    metadata = {"model": options.model, "seed": str(options.seed), "steps": str(len(losses))}
    save_file(params, options.out, metadata=metadata)
    log.info("wrote %s: %.1f MB", options.out, options.out.stat().st_size / 1e6)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        main()
    except ConfigError as err:
        say(f"error: {err}", sys.stderr)
        sys.exit(2)
