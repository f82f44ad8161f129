"""From a name to a backbone: small ones of our own, torchvision's AlexNet, anything in timm or open_clip."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rayfed.data.text import WINDOW
from rayfed.errors import ConfigError
from rayfed.models import clip
from rayfed.models.backbone import Backbone
from rayfed.models.bare import HALF, IMAGENET_MEAN, IMAGENET_STD, Bare
from rayfed.models.char_lstm import CharLSTM
from rayfed.models.checkpoints import Published, load_into, locate
from rayfed.models.config import ModelConfig
from rayfed.models.unet import STANDARDISED_MEAN, STANDARDISED_STD, unet
from rayfed.objective import NEXT_CHARACTER, SEGMENTATION
from rayfed.seeds import derive, seeded


def build_backbone(config: ModelConfig, classes: int | Sequence[str], seed: int) -> Backbone:
    """A float32 backbone with a new head.

    Random weights depend on the seed only, and the head does not depend on where the other weights come from.
    Under torch.device("meta") no weights are read: `rayfed.models.sharing.attach` brings them.

    Args:
        config: Which backbone.
        classes: Names of the classes, which CLIP models read, or only their number.
        seed: Seed of the experiment.

    Raises:
        ConfigError: No such model, it refuses the options, or its weights are missing or do not fit.
    """
    names = [""] * classes if isinstance(classes, int) else list(classes)
    with seeded(derive(seed, "model")):
        other = _open_clip if config.name.startswith(clip.PREFIX) else _timm
        bare = _BUILDERS.get(config.name, other)(config)
    if torch.get_default_device().type != "meta":
        _load(config, bare)
    model = _assemble(config, bare, names, seed)
    model.size, model.task = bare.size, bare.task
    model.mean, model.std = config.mean or bare.mean, config.std or bare.std
    return model


def _assemble(config: ModelConfig, bare: Bare, names: Sequence[str], seed: int) -> Backbone:
    if bare.tokenizer is not None:
        tower, scores, text = clip.take_apart(bare.net, names, config.template, bare.tokenizer)
        return Backbone(tower, scores, config.name, text)
    with seeded(derive(seed, "model", "head")):
        # Drawn here: timm's own classifiers start at zero or from a truncated normal, by family.
        pixelwise = bare.task == SEGMENTATION
        head = nn.Conv2d(bare.width, len(names), 1) if pixelwise else nn.Linear(bare.width, len(names))
    return Backbone(bare.net, head, config.name)


def _load(config: ModelConfig, bare: Bare) -> None:
    if config.pretrained is False:
        return
    if isinstance(config.pretrained, str) and not bare.is_tag:
        load_into(bare.net, Path(config.pretrained).expanduser(), bare.classifiers)
    elif bare.packaged:
        with as_file(files("rayfed.models") / "weights" / bare.packaged) as path:
            load_into(bare.net, path, bare.classifiers)
    elif bare.published is None:
        raise ConfigError(
            f"model.pretrained=true: no weights are published for {config.name!r}; set model.pretrained=PATH "
            f"to a local state dict, or model.pretrained=false for random weights"
        )
    else:
        path = locate(config.name, bare.published)
        if bare.load is None:
            load_into(bare.net, path, bare.classifiers)
        else:
            bare.load(str(path))


def _vit_mini(config: ModelConfig) -> Bare:
    from timm.models.vision_transformer import VisionTransformer

    return _mini(config, VisionTransformer, {"depth": 12, "num_heads": 4}, packaged="vit_mini.safetensors")


def _mixer_mini(config: ModelConfig) -> Bare:
    from timm.models.mlp_mixer import MlpMixer

    return _mini(config, MlpMixer, {"num_blocks": 12})


def _mini(
    config: ModelConfig, family: Callable[..., nn.Module], depth: dict[str, int], packaged: str = ""
) -> Bare:
    """A small member of a timm family: 16 tokens of 8 x 8 pixels at 32 x 32, width 64, 12 blocks."""
    size = _pixels(config, 32)
    options = {"patch_size": 8, "embed_dim": 64, **depth, **config.options, "img_size": size}
    return Bare(
        net=_construct(config, lambda: family(**options, num_classes=0)),
        width=options["embed_dim"],
        size=size,
        mean=HALF,
        std=HALF,
        classifiers=("head",),
        packaged=packaged,
    )


def _alexnet(config: ModelConfig) -> Bare:
    from torchvision.models import AlexNet_Weights, alexnet

    net: Any = _construct(config, lambda: alexnet(**config.options))
    last = net.classifier[6]
    net.classifier[6] = nn.Identity()
    url = AlexNet_Weights.IMAGENET1K_V1.url
    return Bare(
        net=net,
        width=last.in_features,
        size=_pixels(config, 224),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        classifiers=("classifier.6",),
        published=Published(files=(url.rpartition("/")[2],), url=url),
    )


def _alexnet_bn(config: ModelConfig) -> Bare:
    from rayfed.models.alexnet_bn import WIDTH, AlexNetBN

    return Bare(
        net=_construct(config, lambda: AlexNetBN(**config.options)),
        width=WIDTH,
        size=_pixels(config, 256),
        mean=(0.0, 0.0, 0.0),  # its authors do not normalise
        std=(1.0, 1.0, 1.0),
        classifiers=("head",),
    )


def _timm(config: ModelConfig) -> Bare:
    import timm

    known = _timm_config(config.name)
    size = _pixels(config, known.input_size[-1])
    # timm's mark of the families whose constructor takes the input size; convolutional ones take any.
    options = {**config.options, "img_size": size} if known.fixed_input_size else config.options
    net: Any = _construct(config, lambda: timm.create_model(config.name, num_classes=0, **options))
    names = known.classifier or "head"
    bare = Bare(
        net=net,
        width=net.head_hidden_size if hasattr(net, "head_hidden_size") else net.num_features,
        size=size,
        mean=known.mean,
        std=known.std,
        classifiers=(names,) if isinstance(names, str) else tuple(names),
        published=_published(known),
    )
    return replace(bare, load=net.load_pretrained) if known.custom_load else bare


def _timm_config(name: str) -> Any:
    """The record that timm keeps of a model's published weights.

    Raises:
        ConfigError: Unknown model or tag; names the nearest ones.
    """
    import timm

    base, _, tag = name.partition(".")
    if not timm.is_model(base):
        names = [*_BUILDERS, *timm.list_models()]
        near = difflib.get_close_matches(name, names, n=3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
        own = ", ".join(sorted(_BUILDERS))
        raise ConfigError(f"model.name: {name!r} does not exist{hint} Choose {own} or a model of timm")
    tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{base}.*")]
    if tag and tag not in tags:
        raise ConfigError(
            f"model.name: {base!r} has no weights {tag!r}; choose one of: {', '.join(tags) or 'none'}"
        )
    return timm.get_pretrained_cfg(name)


def _published(known: Any) -> Published | None:
    if known.hf_hub_id:
        named = known.hf_hub_filename or "pytorch_model.bin"
        safe = {
            "pytorch_model.bin": "model.safetensors",
            "open_clip_pytorch_model.bin": "open_clip_model.safetensors",
        }
        names = (safe[named], named) if named in safe else (named,)
        return Published(files=names, repository=known.hf_hub_id)
    if known.url:
        return Published(files=(known.url.rpartition("/")[2],), url=known.url)
    return None


def _pixels(config: ModelConfig, default: int) -> int:
    """Input size from `model.size` or the option `img_size`, which may say the same thing.

    Raises:
        ConfigError: They differ, or the input would not be a square.
    """
    option = config.options.get("img_size", config.size or default)
    sides = set(option) if isinstance(option, list | tuple) else {option}
    if config.size is not None:
        sides.add(config.size)
    if len(sides) != 1:
        raise ConfigError(
            f"model.options.img_size: {option!r} is not model.size squared; set model.size only"
        )
    return int(sides.pop())


def _construct(config: ModelConfig, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (TypeError, ValueError, AssertionError) as err:
        reason = " ".join(str(err).split()) or "its constructor refuses them"
        raise ConfigError(f"model.options: {config.options} do not fit {config.name!r}: {reason}") from err


def _clip_mini(config: ModelConfig) -> Bare:
    from rayfed.models.captions import tokenize

    depth = {"depth": 12, **config.options}
    return Bare(
        net=_construct(config, lambda: clip.mini(**depth)),
        width=64,
        size=_fixed_pixels(config, 32),
        mean=HALF,
        std=HALF,
        classifiers=(),
        packaged="clip_mini.safetensors",
        tokenizer=tokenize,
    )


def _open_clip(config: ModelConfig) -> Bare:
    known = clip.known(config.name, config.pretrained)
    return Bare(
        net=_construct(config, lambda: known.build(config.options)),
        width=known.width,
        size=_fixed_pixels(config, known.size),
        mean=known.mean,
        std=known.std,
        classifiers=(),
        published=known.published,
        is_tag=known.is_tag,
        tokenizer=known.tokenizer,
    )


def _fixed_pixels(config: ModelConfig, size: int) -> int:
    if config.size not in (None, size):
        raise ConfigError(f"model.size: {config.size} is not {size}, which {config.name!r} is made for")
    return size


def _unet(config: ModelConfig) -> Bare:
    options = {"width": 32, **config.options}
    size = _pixels(config, 384)
    return Bare(
        net=_construct(config, lambda: unet(size=size, **options)),
        width=options["width"],
        size=size,
        mean=STANDARDISED_MEAN,
        std=STANDARDISED_STD,
        classifiers=("head",),
        task=SEGMENTATION,
    )


def _char_lstm(config: ModelConfig) -> Bare:
    net = _construct(config, lambda: CharLSTM(**config.options))
    return Bare(
        net=net,
        width=net.width,
        size=config.size or WINDOW,
        mean=HALF,
        std=HALF,
        classifiers=("head",),
        task=NEXT_CHARACTER,
    )


_BUILDERS: Mapping[str, Callable[[ModelConfig], Bare]] = {
    "alexnet": _alexnet,
    "alexnet_bn": _alexnet_bn,
    "char_lstm": _char_lstm,
    "clip_mini": _clip_mini,
    "mixer_mini": _mixer_mini,
    "unet": _unet,
    "vit_mini": _vit_mini,
}
