"""Construct networks by name: the project's own small ones, and those of torchvision, timm and open_clip."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from rayfed.data.text import WINDOW
from rayfed.errors import ConfigError
from rayfed.models import clip, open_clip_models
from rayfed.models.bare_network import HALF, IMAGENET_MEAN, IMAGENET_STD, BareNetwork
from rayfed.models.char_lstm import CharLSTM
from rayfed.models.checkpoints import PublishedWeights
from rayfed.models.config import OPEN_CLIP, ModelConfig
from rayfed.models.unet import STANDARDISED_MEAN, STANDARDISED_STD, unet
from rayfed.objective import NEXT_CHARACTER, SEGMENTATION


def construct_network(config: ModelConfig) -> BareNetwork:
    """The network that `model.name` names, with random values, or without values on the meta device.

    Raises:
        ConfigError: No such model, or its constructor refuses the options.
    """
    general = _open_clip if config.name.startswith(OPEN_CLIP) else _timm
    return BUILDERS.get(config.name, general)(config)


def _vit_mini(config: ModelConfig) -> BareNetwork:
    from timm.models.vision_transformer import VisionTransformer

    return _mini(config, VisionTransformer, {"depth": 12, "num_heads": 4}, packaged="vit_mini.safetensors")


def _mixer_mini(config: ModelConfig) -> BareNetwork:
    from timm.models.mlp_mixer import MlpMixer

    return _mini(config, MlpMixer, {"num_blocks": 12})


def _mini(
    config: ModelConfig, family: Callable[..., nn.Module], depth: dict[str, int], packaged: str = ""
) -> BareNetwork:
    """A small model of a timm family: 32 x 32 images as 16 tokens of 8 x 8 pixels, width 64, 12 blocks."""
    size = _pixels(config, 32)
    options = {"patch_size": 8, "embed_dim": 64, **depth, **config.options, "img_size": size}
    return BareNetwork(
        net=_construct(config, lambda: family(**options, num_classes=0)),
        width=options["embed_dim"],
        size=size,
        mean=HALF,
        std=HALF,
        classifiers=("head",),
        packaged=packaged,
    )


def _alexnet(config: ModelConfig) -> BareNetwork:
    from torchvision.models import AlexNet_Weights, alexnet

    net: Any = _construct(config, lambda: alexnet(**config.options))
    last = net.classifier[6]
    net.classifier[6] = nn.Identity()
    url = AlexNet_Weights.IMAGENET1K_V1.url
    return BareNetwork(
        net=net,
        width=last.in_features,
        size=_pixels(config, 224),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        classifiers=("classifier.6",),
        published=PublishedWeights(files=(url.rpartition("/")[2],), url=url),
    )


def _alexnet_bn(config: ModelConfig) -> BareNetwork:
    from rayfed.models.alexnet_bn import WIDTH, AlexNetBN

    return BareNetwork(
        net=_construct(config, lambda: AlexNetBN(**config.options)),
        width=WIDTH,
        size=_pixels(config, 256),
        mean=(0.0, 0.0, 0.0),  # FedBN, its source, does not normalise inputs
        std=(1.0, 1.0, 1.0),
        classifiers=("head",),
    )


def _timm(config: ModelConfig) -> BareNetwork:
    import timm

    known = _timm_config(config.name)
    size = _pixels(config, known.input_size[-1])
    # Only families that timm marks so take an input size; convolutional networks accept images of any size.
    options = {**config.options, "img_size": size} if known.fixed_input_size else config.options
    net: Any = _construct(config, lambda: timm.create_model(config.name, num_classes=0, **options))
    names = known.classifier or "head"
    bare = BareNetwork(
        net=net,
        width=net.head_hidden_size if hasattr(net, "head_hidden_size") else net.num_features,
        size=size,
        mean=known.mean,
        std=known.std,
        classifiers=(names,) if isinstance(names, str) else tuple(names),
        published=_published(known),
        # timm keeps a margin around the centre (crop_pct), which is not cut off here.
        resize="crop" if known.crop_mode == "center" else "squash",
    )
    return replace(bare, load=net.load_pretrained) if known.custom_load else bare


def _timm_config(name: str) -> Any:
    """Look up timm's description of a model and its published weights.

    Raises:
        ConfigError: timm has no such model or no such weights; names the nearest models or all tags.
    """
    import timm

    base, _, tag = name.partition(".")
    if not timm.is_model(base):
        names = [*BUILDERS, *timm.list_models()]
        near = difflib.get_close_matches(name, names, n=3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
        raise ConfigError(
            f"model.name: {name!r} does not exist{hint} Choose one that `rayfed list` shows, or any of timm"
        )
    tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{base}.*")]
    if tag and tag not in tags:
        raise ConfigError(
            f"model.name: {base!r} has no weights {tag!r}; choose one of: {', '.join(tags) or 'none'}"
        )
    return timm.get_pretrained_cfg(name)


def _published(known: Any) -> PublishedWeights | None:
    if known.hf_hub_id:
        named = known.hf_hub_filename or "pytorch_model.bin"
        safe = {
            "pytorch_model.bin": "model.safetensors",
            "open_clip_pytorch_model.bin": "open_clip_model.safetensors",
        }
        names = (safe[named], named) if named in safe else (named,)
        return PublishedWeights(files=names, repository=known.hf_hub_id)
    if known.url:
        return PublishedWeights(files=(known.url.rpartition("/")[2],), url=known.url)
    return None


def _pixels(config: ModelConfig, default: int) -> int:
    """Input height and width from `model.size` or the option `img_size`.

    Raises:
        ConfigError: Both are set and differ, or `img_size` is not a square.
    """
    option = config.options.get("img_size", config.size or default)
    sides = set(option) if isinstance(option, list | tuple) else {option}
    if config.size is not None:
        sides.add(config.size)
    if len(sides) != 1:
        raise ConfigError(
            f"model.options.img_size: {option!r} is not a square of model.size; set model.size only"
        )
    return int(sides.pop())


def _construct(config: ModelConfig, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (TypeError, ValueError, AssertionError) as err:
        reason = " ".join(str(err).split()) or "its constructor refuses them"
        raise ConfigError(f"model.options: {config.options} do not fit {config.name!r}: {reason}") from err


def _clip_mini(config: ModelConfig) -> BareNetwork:
    from rayfed.models.captions import tokenize

    depth = {"depth": 12, **config.options}
    return BareNetwork(
        net=_construct(config, lambda: clip.mini(**depth)),
        width=64,
        size=_fixed_pixels(config, 32),
        mean=HALF,
        std=HALF,
        classifiers=(),
        packaged="clip_mini.safetensors",
        tokenizer=tokenize,
    )


def _open_clip(config: ModelConfig) -> BareNetwork:
    known = open_clip_models.find_model(config.name, config.pretrained)
    return BareNetwork(
        net=_construct(config, lambda: known.build(config.options)),
        width=known.width,
        size=_fixed_pixels(config, known.size),
        mean=known.mean,
        std=known.std,
        classifiers=(),
        published=known.published,
        is_tag=known.is_tag,
        tokenizer=known.tokenizer,
        resize=known.resize,
    )


def _fixed_pixels(config: ModelConfig, size: int) -> int:
    if config.size not in (None, size):
        raise ConfigError(
            f"model.size: {config.size} is not allowed: {config.name!r} takes {size} only; leave it out"
        )
    return size


def _unet(config: ModelConfig) -> BareNetwork:
    options = {"width": 32, **config.options}
    size = _pixels(config, 384)
    return BareNetwork(
        net=_construct(config, lambda: unet(size=size, **options)),
        width=options["width"],
        size=size,
        mean=STANDARDISED_MEAN,
        std=STANDARDISED_STD,
        classifiers=("head",),
        task=SEGMENTATION,
    )


def _char_lstm(config: ModelConfig) -> BareNetwork:
    net = _construct(config, lambda: CharLSTM(**config.options))
    return BareNetwork(
        net=net,
        width=net.width,
        size=config.size or WINDOW,
        mean=HALF,
        std=HALF,
        classifiers=("head",),
        task=NEXT_CHARACTER,
    )


BUILDERS: Mapping[str, Callable[[ModelConfig], BareNetwork]] = {
    "alexnet": _alexnet,
    "alexnet_bn": _alexnet_bn,
    "char_lstm": _char_lstm,
    "clip_mini": _clip_mini,
    "mixer_mini": _mixer_mini,
    "unet": _unet,
    "vit_mini": _vit_mini,
}
"""Constructors by `model.name`; any other name is a model of timm or open_clip."""
