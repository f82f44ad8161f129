"""Construct networks by name: the project's own small ones, and those of torchvision, timm and open_clip.

Models of open_clip and their published weights are found by `model.name` and `model.pretrained`.

AlexNet with BatchNorm: the baseline that FedCLIP's tables train from random weights.

Krizhevsky, One Weird Trick for Parallelizing Convolutional Neural Networks, 2014, with a BatchNorm layer
after every convolution and after the first two linear layers and without dropout (Li et al., FedBN, ICLR
2021).

The network of the Shakespeare experiments: embedded characters, two LSTM layers, the last hidden state.

McMahan et al., AISTATS 2017, and LEAF: embeddings of size 8, 2 layers; 256 hidden units as in the code of
q-FFL, which FFT-GP follows.

The U-Net of the Fed-Prostate experiments, from MONAI.

Ronneberger, Fischer, Brox, U-Net, MICCAI 2015, in the size of GRACE's and HarmoFL's released code: two 3 x 3
convolutions without bias at every level, widths from `width` to 16 `width` at the bottom, transposed
convolutions on the way up.

Differs from that code: every convolution is followed by a ReLU (there, the second one is not), and
InstanceNorm without parameters replaces BatchNorm without parameters and running statistics.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.data.data_config import Resize
from rayfed.data.grey_levels import DEVIATION_LEVELS, MEAN_LEVEL
from rayfed.data.text import SYMBOLS, WINDOW
from rayfed.errors import ConfigError, unknown
from rayfed.models import clip
from rayfed.models.clip import Tokenizer
from rayfed.models.language import PACKAGED, TextModel, build, is_text
from rayfed.models.model_config import OPEN_CLIP, ModelConfig
from rayfed.models.weight_files import PublishedWeights
from rayfed.objective import (
    CLASSIFICATION,
    LANGUAGE_MODELING,
    NEXT_CHARACTER,
    SEGMENTATION,
    TEXT_CLASSIFICATION,
)

Channels = tuple[float, float, float]
IMAGENET_MEAN: Channels = (0.485, 0.456, 0.406)
IMAGENET_STD: Channels = (0.229, 0.224, 0.225)
HALF: Channels = (0.5, 0.5, 0.5)


@dataclass(frozen=True, kw_only=True)
class BareNetwork:
    """A network without classifier and without pre-trained weights.

    Attributes:
        net: The network, with random values, or without values on the meta device.
        width: Number of its features.
        size: Input height and width in pixels, or length of a text in characters.
        mean, std: Mean and standard deviation by channel that its inputs are normalized with.
        classifiers: Names of the classifier's modules in its weight files.
        published: Location of its published weights; None if there are none.
        packaged: File in rayfed/models/weights/ with its weights; empty if there is none.
        load: Reads a published file that is in the authors' own format; None if the file is a state dict.
        is_tag: Whether `model.pretrained` is the tag of published weights, not a path.
        tokenizer: Turns texts into tokens; set for CLIP models only, whose `net` has both towers.
        task: The task that it solves, a name of `rayfed.objective`.
        resize: How its own transform makes a square of an image: `crop` where it cuts out the centre.
        words: A model of transformers, which makes its own head and reads its own weights; None: another.
    """

    net: nn.Module
    width: int
    size: int
    mean: Channels
    std: Channels
    classifiers: tuple[str, ...]
    published: PublishedWeights | None = None
    packaged: str = ""
    load: Callable[[str], None] | None = None
    is_tag: bool = False
    tokenizer: Tokenizer | None = None
    task: str = CLASSIFICATION
    resize: Resize = "squash"
    words: TextModel | None = None


WIDTH = 4096
CONVOLUTIONS = ((64, 11, 4, 2), (192, 5, 1, 2), (384, 3, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1))
"""Output channels, kernel size, stride and padding of each convolution."""

POOLED = (0, 1, 4)
"""Indices of the convolutions that are followed by a pooling layer."""


class SingleNorm(nn.BatchNorm1d):
    """BatchNorm that normalizes a batch of one image with its running statistics, as in evaluation.

    One image has no variance, so PyTorch's own layer raises an error in training.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) == 1:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(x)


class AlexNetBN(nn.Module):
    """Maps images (B, 3, size, size), size >= 63, to features (B, 4096)."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for i, (channels, kernel, stride, padding) in enumerate(CONVOLUTIONS):
            layers += [
                nn.Conv2d(before, channels, kernel, stride, padding),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
            ]
            layers += [nn.MaxPool2d(3, 2)] if i in POOLED else []
            before = channels
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(6)
        self.hidden = nn.Sequential(
            *(nn.Linear(36 * before, WIDTH), SingleNorm(WIDTH), nn.ReLU()),
            *(nn.Linear(WIDTH, WIDTH), SingleNorm(WIDTH), nn.ReLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.hidden(torch.flatten(self.pool(self.features(x)), 1))
        return features


class CharLSTM(nn.Module):
    """Maps symbols (B, length) to the last hidden state (B, hidden).

    The forget gates start with a bias of 1, the default of TensorFlow, which the authors' code uses.
    """

    def __init__(self, embedding: int = 8, hidden: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.width = hidden
        self.embedding = nn.Embedding(SYMBOLS, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        with torch.no_grad():
            for layer in range(layers):
                # PyTorch adds two biases, in the order input, forget, cell, output.
                getattr(self.lstm, f"bias_ih_l{layer}")[hidden : 2 * hidden] = 1
                getattr(self.lstm, f"bias_hh_l{layer}")[hidden : 2 * hidden] = 0

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(x))
        return states[:, -1]


LEVELS = 4
"""Number of times that the network halves the size of its input."""

STANDARDISED_MEAN = (MEAN_LEVEL / 255,) * 3
STANDARDISED_STD = (DEVIATION_LEVELS / 255,) * 3
"""Normalization that turns prepared slices back into standard deviations from the volume's mean."""


def unet(size: int, width: int) -> nn.Module:
    """A U-Net without its last layer; maps images (B, 3, size, size) to features (B, width, size, size).

    Args:
        size: Input height and width in pixels, a multiple of 2 ** LEVELS.
        width: Channels of the first level and of the features.

    Raises:
        ConfigError: MONAI is not installed, or the size is not a multiple of 2 ** LEVELS.
    """
    if size % 2**LEVELS:
        raise ConfigError(f"model.size: {size} is not a multiple of {2**LEVELS}, which 'unet' needs")
    try:
        from monai.networks.nets.basic_unet import BasicUNet
    except ImportError as err:
        raise ConfigError("model.name: 'unet' needs MONAI; install rayfed-sim[segmentation]") from err
    net: nn.Module = BasicUNet(
        spatial_dims=2,
        in_channels=3,
        out_channels=1,
        features=(*(width * 2**level for level in range(LEVELS + 1)), width),
        act="RELU",
        norm=("instance", {"affine": False}),
        bias=False,
        upsample="deconv",
    )
    net.final_conv = nn.Identity()
    return net


@dataclass(frozen=True, kw_only=True)
class OpenClipModel:
    """A model of open_clip that is not built yet.

    Attributes:
        name: Its name in open_clip.
        width: Number of features of both towers.
        size: Input height and width in pixels.
        mean, std: Mean and standard deviation by channel that its inputs are normalized with.
        published: Location of the chosen weights; None if there are none.
        resize: How its transform makes a square of an image.
        is_tag: Whether `model.pretrained` is the tag of published weights, not a path.
    """

    name: str
    width: int
    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    published: PublishedWeights | None
    is_tag: bool
    resize: Resize = "crop"

    def build(self, options: dict[str, Any]) -> nn.Module:
        """Build the network with random weights.

        Args:
            options: Override open_clip's own arguments of the constructor.
        """
        with without_compiler():
            from open_clip import CLIP, CustomTextCLIP, get_model_config

        config = {**(get_model_config(self.name) or {}), **options}
        kind = CustomTextCLIP if config.pop("custom_text", False) else CLIP
        net: nn.Module = kind(**config)
        return net

    def tokenizer(self, texts: Sequence[str]) -> Tensor:
        """Tokens of texts by open_clip's tokenizer of the model, shape (len(texts), length)."""
        with without_compiler():
            from open_clip import get_tokenizer

        with torch.device("cpu"):
            tokens: Tensor = get_tokenizer(self.name)(list(texts))
        return tokens.to(torch.empty(0).device)


def find_model(name: str, pretrained: bool | str) -> OpenClipModel:
    """Look up `open_clip/<model>` and one of its published weights in open_clip's tables.

    Args:
        name: The value of `model.name`.
        pretrained: The value of `model.pretrained`: a tag chooses weights, True the first tag of the model.

    Raises:
        ConfigError: open_clip has no such model, or its text tower is of another library.
    """
    with without_compiler():
        import open_clip
    from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
    from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model

    model = name.removeprefix(OPEN_CLIP)
    config = open_clip.get_model_config(model)
    if config is None:
        raise ConfigError(unknown("model.name", name, [OPEN_CLIP + n for n in open_clip.list_models()]))
    if "multimodal_cfg" in config or "hf_model_name" in config["text_cfg"]:
        raise ConfigError(
            f"model.name: {name!r} has a text tower of another library; choose a plain model such as "
            f"open_clip/ViT-B-32-quickgelu"
        )
    tags = list_pretrained_tags_by_model(model)
    tag = pretrained if isinstance(pretrained, str) else next(iter(tags), "")
    weights = get_pretrained_cfg(model, tag) if tag in tags else {}
    size = config["vision_cfg"].get("image_size", 224)
    return OpenClipModel(
        name=model,
        width=config["embed_dim"],
        size=size if isinstance(size, int) else size[0],
        mean=tuple(weights.get("mean") or OPENAI_DATASET_MEAN),
        std=tuple(weights.get("std") or OPENAI_DATASET_STD),
        published=_open_clip_published(weights),
        is_tag=isinstance(pretrained, str) and tag in tags,
        resize="squash" if weights.get("resize_mode") == "squash" else "crop",
    )


def _open_clip_published(weights: dict[str, Any]) -> PublishedWeights | None:
    if repository := weights.get("hf_hub"):
        folder, _, file = repository.rpartition("/")
        names = (file,) if file else ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
        return PublishedWeights(files=names, repository=folder)
    if url := weights.get("url"):
        return PublishedWeights(files=(url.rpartition("/")[2],), url=url)
    return None


def construct_network(config: ModelConfig, task: str | None = None) -> BareNetwork:
    """The network that `model.name` names, with random values, or without values on the meta device.

    Args:
        task: What a model of transformers is built for; None: what it was pre-trained for.

    Raises:
        ConfigError: No such model, or its constructor refuses the options.
    """
    if is_text(config.name):
        return _words(config, task)
    general = _open_clip if config.name.startswith(OPEN_CLIP) else _timm
    return BUILDERS.get(config.name, general)(config)


COMPILER = "torch._dynamo.utils"


class _LaterCompiler(ModuleType):
    """Stands for a module of torch's compiler, which is imported when something of it is used."""

    def is_compile_supported(self, device: str) -> bool:
        """Whether the compiler knows a device; what torchvision takes from the module when it is imported."""
        return bool(_compiler(self).is_compile_supported(device))

    def __getattr__(self, name: str) -> Any:
        """Anything else of the module."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_compiler(self), name)


def _compiler(later: ModuleType) -> ModuleType:
    """The module itself. Args: later: what stands for it."""
    if sys.modules.get(COMPILER) is later:
        del sys.modules[COMPILER]
    return importlib.import_module(COMPILER)


_disable = torch.compiler.disable


def _disable_later(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`torch.compiler.disable`, which imports the compiler when the function is called."""
    if not callable(function):
        return partial(_disable_later, *args, **kwargs)
    disabled = cache(partial(_disable, function, *args, **kwargs))
    return wraps(function)(lambda *own, **named: disabled()(*own, **named))


@contextmanager
def without_compiler() -> Iterator[None]:
    """Import timm and torchvision in the block without torch's compiler, which takes as long as torch.

    One function of torchvision asks the compiler whether it knows a device, and one network of timm has
    functions that are not compiled; neither is used here.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    later = _LaterCompiler(COMPILER)
    sys.modules[COMPILER] = later
    setattr(torch.compiler, "disable", _disable_later)  # noqa: B010  (mypy knows the type of the original)
    try:
        yield
    finally:
        setattr(torch.compiler, "disable", _disable)  # noqa: B010
        if sys.modules.get(COMPILER) is later:
            del sys.modules[COMPILER]


def _vit_mini(config: ModelConfig) -> BareNetwork:
    with without_compiler():
        from timm.models.vision_transformer import VisionTransformer

    return _mini(config, VisionTransformer, {"depth": 12, "num_heads": 4}, packaged="vit_mini.safetensors")


def _mixer_mini(config: ModelConfig) -> BareNetwork:
    with without_compiler():
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
    with without_compiler():
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

    return BareNetwork(
        net=_construct(config, lambda: AlexNetBN(**config.options)),
        width=WIDTH,
        size=_pixels(config, 256),
        mean=(0.0, 0.0, 0.0),  # FedBN, its source, does not normalize inputs
        std=(1.0, 1.0, 1.0),
        classifiers=("head",),
    )


def _timm(config: ModelConfig) -> BareNetwork:
    with torch.device("cpu"), without_compiler():  # it computes while it is imported, which `skeleton` cannot
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
        published=_published_weights(known),
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
        names = [*PACKAGED, *BUILDERS, *timm.list_models()]
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


def _published_weights(known: Any) -> PublishedWeights | None:
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
    known = find_model(config.name, config.pretrained)
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


def _words(config: ModelConfig, task: str | None) -> BareNetwork:
    network = build(config, task)
    return BareNetwork(
        net=network.net,
        width=network.width,
        size=network.size,
        mean=HALF,
        std=HALF,
        classifiers=(),
        task=(task or TEXT_CLASSIFICATION) if network.new_head else LANGUAGE_MODELING,
        words=network,
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
"""Constructors by `model.name`; any other name is a model of timm, open_clip or transformers."""
