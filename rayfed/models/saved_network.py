"""Writes a trained network as its library has it: a folder that transformers, timm or a user's code loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rayfed.errors import ConfigError, one_line
from rayfed.models.backbone import Backbone
from rayfed.models.clip import ClipHead
from rayfed.models.language import TextNet, whole_model
from rayfed.models.library_form import as_in_library, head_names, name_of_head
from rayfed.models.model_config import ModelConfig
from rayfed.models.user_model import OwnBackbone

WEIGHTS = "model.safetensors"
NAMES = "config.json"


def save_network(
    model: Backbone, bare: Backbone, config: ModelConfig, labels: Mapping[str, str], folder: Path
) -> None:
    """Write a network without adapters, with the names of its classes.

    Args:
        model: The model with its final values, into which adapters were merged.
        bare: The same one without a tuning, with or without values.
        config: The section `model` of its experiment.
        labels: Name of each output of a classifier by its number, as text; empty: it classifies nothing.
        folder: Is made; files of these names are replaced.

    Raises:
        ConfigError: The library's network cannot hold what was trained.
    """
    if more := sorted(model.state_dict().keys() ^ bare.state_dict().keys()):
        raise ConfigError(
            f"merged: {more[0]!r}, which was trained, is no part of {model.label!r} as its library has it; "
            f"run.params has all trained tensors, and run.model() computes with them"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, OwnBackbone):
        _write(model.deployed().state_dict(), {"id2label": dict(labels)}, folder)
        return
    values = values_in_library(model)
    if isinstance(model.net, TextNet):
        whole_model(model, config, values, labels).save_pretrained(folder)
        _save_tokenizer(model, folder)
    elif _is_of_timm(config.name):
        _save_for_timm(model, config, values, labels, folder)
    else:
        _write(values, {"architecture": config.name, "id2label": dict(labels)}, folder)


def values_in_library(model: Backbone) -> dict[str, Tensor]:
    """All values of a model by the names that they have in its library, those of the head included.

    Raises:
        ConfigError: Its head is none of the library, as that of a CLIP model, which compares with texts.
    """
    heads = head_names(model)
    if isinstance(model.head, ClipHead) or not heads:
        raise ConfigError(
            f"merged: {model.label!r} has no classifier in its library; run.params has all trained tensors, "
            f"and run.model() computes with them"
        )
    with as_in_library(model) as root:
        values = {name: value.detach() for name, value in root.state_dict().items()}
    own = {f"head.{name}": value.detach() for name, value in model.head.state_dict().items()}
    return values | {name_of_head(heads, name): value for name, value in own.items()}


def _write(values: Mapping[str, Tensor], about: Mapping[str, Any], folder: Path) -> None:
    """Write values and facts. Args: values: by name; several may be the same tensor."""
    from safetensors.torch import save_file

    copies = {name: value.detach().cpu().contiguous().clone() for name, value in values.items()}
    save_file(copies, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / NAMES).write_text(json.dumps(about, indent=1, ensure_ascii=False), encoding="utf-8")


def _save_tokenizer(model: Backbone, folder: Path) -> None:
    from rayfed.data.tokenizer import load_tokenizer

    assert model.tokenizer is not None
    load_tokenizer(model.tokenizer).save_pretrained(folder)


def _is_of_timm(name: str) -> bool:
    import timm

    return timm.is_model(name.partition(".")[0])


def _save_for_timm(
    model: Backbone,
    config: ModelConfig,
    values: Mapping[str, Tensor],
    labels: Mapping[str, str],
    folder: Path,
) -> None:
    import timm
    from timm.models import save_for_hf

    known = timm.get_pretrained_cfg(config.name)
    fixed = known is not None and known.fixed_input_size
    options = {**config.options, **({"img_size": model.size} if fixed else {})}
    whole: Any = timm.create_model(config.name, num_classes=model.num_classes, **options)
    _load(whole, values, config.name)
    whole.pretrained_cfg = {
        **whole.pretrained_cfg,
        "input_size": (3, model.size, model.size),
        "mean": model.mean,
        "std": model.std,
        "crop_pct": 1.0,
        "crop_mode": "center" if model.resize == "crop" else "squash",
        "interpolation": "bicubic",
    }
    save_for_hf(
        whole,
        str(folder),
        model_config={"label_names": [labels[str(i)] for i in range(len(labels))]},
        model_args=options,
        safe_serialization=True,
    )


def _load(whole: nn.Module, values: Mapping[str, Tensor], name: str) -> None:
    """Load values into a whole network. Raises ConfigError where names or shapes differ."""
    try:
        with torch.no_grad():
            whole.load_state_dict(values)
    except RuntimeError as err:
        raise ConfigError(
            f"merged: the network {name!r} of its library cannot hold what was trained "
            f"({one_line(err)[:200]}); run.params has all trained tensors"
        ) from err
