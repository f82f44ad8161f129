"""Build the backbone that a config names, with random or published weights and a new head."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path

import torch
from torch import nn

from rayfed.errors import ConfigError
from rayfed.models import clip
from rayfed.models.backbone import Backbone
from rayfed.models.model_config import ModelConfig
from rayfed.models.networks import BareNetwork, construct_network
from rayfed.models.user_model import Network
from rayfed.models.weight_files import load_into, locate
from rayfed.objective import SEGMENTATION
from rayfed.seeds import derive, use_seed


def build_backbone(
    config: ModelConfig,
    classes: int | Sequence[str],
    seed: int,
    task: str | None = None,
    network: Network | None = None,
) -> Backbone:
    """Build a float32 backbone with a new head.

    Random weights depend on the seed only; the head is the same for random and for published weights. Under
    torch.device("meta") no weights are read: `rayfed.models.shared_weights.attach` sets them later.

    Args:
        config: The model and its weights.
        classes: Names of the classes, from which CLIP models make class prompts, or only their number.
        task: The task of the data, for models of transformers, which can classify texts or write them; None:
            what the model was pre-trained for.
        network: The network of a user that `config.name` names; None: it names one of a library.

    Raises:
        ConfigError: The model does not exist, its constructor refuses the options, or its weights are missing
            or do not fit.
    """
    if network is not None:
        if config.options or config.weights is not None:
            key = "options" if config.options else "weights"
            raise ConfigError(
                f"model.{key}: {getattr(config, key)!r} cannot be used with {config.name!r}, which is a "
                "network of "
                f"yours; make it so, or load the values before it is handed over"
            )
        handed = network.build(classes if isinstance(classes, int) else len(classes), seed)
        handed.size = config.size or handed.size
        return handed
    names = [""] * classes if isinstance(classes, int) else list(classes)
    with use_seed(derive(seed, "model")):
        bare = construct_network(config, task)
    if torch.empty(0).device.type != "meta":
        if bare.words is None:
            _load(config, bare)
        elif config.pretrained is not False:
            bare.words.fill()
    model = _assemble(config, bare, names, seed)
    model.size = bare.size
    model.task = bare.task
    model.tokenizer = None if bare.words is None else bare.words.tokenizer
    model.classifier = bare.classifiers[0] if len(bare.classifiers) == 1 else None
    model.has_new_head = bare.words is None or bare.words.new_head
    model.resize = bare.resize
    model.mean = config.mean or bare.mean
    model.std = config.std or bare.std
    return model


def _assemble(config: ModelConfig, bare: BareNetwork, names: Sequence[str], seed: int) -> Backbone:
    if bare.tokenizer is not None:
        tower, scores, text = clip.take_apart(bare.net, names, config.template, bare.tokenizer)
        return Backbone(tower, scores, config.name, text)
    with use_seed(derive(seed, "model", "head")):
        if bare.words is not None:
            return Backbone(bare.net, bare.words.make_head(len(names)), config.name)
        # Not timm's own classifiers: they start at zero or from a truncated normal, depending on the family.
        pixelwise = bare.task == SEGMENTATION
        head = nn.Conv2d(bare.width, len(names), 1) if pixelwise else nn.Linear(bare.width, len(names))
    return Backbone(bare.net, head, config.name)


def _load(config: ModelConfig, bare: BareNetwork) -> None:
    if config.weights is not None:
        load_into(bare.net, Path(config.weights).expanduser(), bare.classifiers)
    elif config.pretrained is False:
        return
    elif isinstance(config.pretrained, str) and not bare.is_tag:
        raise ConfigError(
            f"model.pretrained: {config.pretrained!r} is no tag of published weights of {config.name!r}; set "
            f"true or false, or model.weights=FILE for a local file"
        )
    elif bare.packaged:
        with as_file(files("rayfed.models") / "weights" / bare.packaged) as path:
            load_into(bare.net, path, bare.classifiers, "model.pretrained")
    elif bare.published is None:
        raise ConfigError(
            f"model.pretrained=true: no weights are published for {config.name!r}; set model.weights=FILE "
            f"to a local state dict, or model.pretrained=false for random weights"
        )
    else:
        path = locate(config.name, bare.published)
        if bare.load is None:
            load_into(bare.net, path, bare.classifiers, "model.pretrained")
        else:
            bare.load(str(path))
