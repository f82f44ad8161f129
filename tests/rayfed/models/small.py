"""Backbones small enough to build in milliseconds, and what is needed to compare them with timm's own."""

import os
from pathlib import Path

import pytest
import torch

from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig

CLASSES = 5
VIT = {"patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2}
MIXER = {"patch_size": 8, "embed_dim": 32, "num_blocks": 4}
NETS = {
    "vit": ("vit_tiny_patch16_224", VIT),
    "mixer": ("mixer_mini", MIXER),
    "deit": ("deit_tiny_patch16_224", VIT),
    "distilled": ("deit_tiny_distilled_patch16_224", VIT),
    "beit": ("beit_base_patch16_224", VIT),
    "resnet": ("resnet10t", {}),
}
TRANSFORMERS = ("vit", "mixer", "deit", "distilled", "beit")
DEPTH_OPTION = {"mixer": "num_blocks"}


def config(kind, **options):
    name, own = NETS[kind]
    return ModelConfig(name=name, pretrained=False, size=32, options=own | options)


def small(kind, seed=0, **options):
    return build_backbone(config(kind, **options), CLASSES, seed)


def images(n=2, size=32):
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(1)) * 2 - 1


def shared(path):
    """A file of the shared folder; the test is skipped where it is absent."""
    root = Path(__file__).parents[3]
    found = (root / os.environ.get("RAYFED_SHARED", "../shared") / path).resolve()
    if not found.exists():
        pytest.skip(f"RAYFED_SHARED has no {path}")
    return found
