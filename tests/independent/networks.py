"""Networks of libraries, as small as their constructors make them, and of a user; all with random values.

A network maps images, shape (B, 3, 32, 32), ids of tokens, shape (B, TOKENS), or rows, shape (B, FEATURES),
to CLASSES outputs. Each function makes a new one; its caller seeds torch.
"""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.nn.utils import parametrizations, spectral_norm

CLASSES, TOKENS, FEATURES, VOCABULARY = 4, 10, 6, 40
Make = Callable[[], nn.Module]


@dataclass(frozen=True)
class Case:
    """A network, what it takes (`images`, `ids` or `rows`), and a learning rate with which it is calm.

    With a larger one, deep networks with BatchNorm over a few rows make of a rounding a difference in the
    first digit, also between two orders of one sum, so that nothing could be compared.
    """

    make: Make
    takes: str = "images"
    lr: float = 0.02
    by_function: bool = False
    """A function that makes it is handed over, not the network itself."""


CALM = 1e-4


def _torchvision(name: str, lr: float = CALM, **options: Any) -> Case:
    def make() -> nn.Module:
        from torchvision import models

        return models.get_model(name, weights=None, num_classes=CLASSES, **options)

    return Case(make, lr=lr)


def _resnet() -> nn.Module:
    from torchvision.models import resnet

    return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], CLASSES)


def _efficientnet() -> nn.Module:
    from torchvision.models import efficientnet

    sizes = [(1, 3, 1, 8, 8, 1), (6, 3, 2, 8, 16, 2), (6, 5, 2, 16, 24, 2)]
    blocks = [efficientnet.MBConvConfig(*each) for each in sizes]
    return efficientnet.EfficientNet(blocks, 0.2, 0.2, CLASSES, last_channel=32)


def _shufflenet() -> nn.Module:
    from torchvision.models import ShuffleNetV2

    return ShuffleNetV2([2, 2, 2], [24, 16, 32, 64, 128], CLASSES)


def _regnet() -> nn.Module:
    from torchvision.models import regnet

    sizes: dict[str, Any] = {"depths": [1, 2], "widths": [16, 32], "group_widths": [8, 8]}
    blocks = regnet.BlockParams(**sizes, bottleneck_multipliers=[1, 1], strides=[2, 2], se_ratio=0.25)
    return regnet.RegNet(blocks, CLASSES)


def _densenet() -> nn.Module:
    from torchvision.models import DenseNet

    return DenseNet(8, (2, 2, 2), 16, 2, 0.1, CLASSES)


def _vgg_bn() -> nn.Module:
    from torchvision.models import vgg

    net = vgg.VGG(vgg.make_layers([8, "M", 16, "M"], batch_norm=True), CLASSES, init_weights=False)
    hidden = nn.Linear(16 * 49, 16), nn.ReLU(True), nn.Dropout()
    net.classifier = nn.Sequential(*hidden, nn.Linear(16, CLASSES))
    return net


def _convnext() -> nn.Module:
    from torchvision.models import convnext

    blocks = [convnext.CNBlockConfig(16, 32, 1), convnext.CNBlockConfig(32, None, 1)]
    return convnext.ConvNeXt(blocks, 0.2, num_classes=CLASSES)


def _swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    sizes: dict[str, Any] = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": [4, 4]}
    return SwinTransformer([2, 2], **sizes, stochastic_depth_prob=0.2, num_classes=CLASSES)


def _timm(name: str, lr: float = CALM, **options: Any) -> Case:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)

    return Case(make, lr=lr)


def _mixer() -> nn.Module:
    from timm.models import MlpMixer

    return MlpMixer(CLASSES, 32, 3, 8, num_blocks=2, embed_dim=32, drop_path_rate=0.2)


SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


def _transformers(kind: str, takes: str, **options: Any) -> Case:
    def make() -> nn.Module:
        import transformers

        network = getattr(transformers, kind)
        return network(network.config_class(num_labels=CLASSES, **options)).train()

    return Case(make, takes)


TEXT = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT |= {"intermediate_size": 16, "max_position_embeddings": 32}

LIBRARIES = {
    "torchvision resnet": Case(_resnet, lr=CALM),
    "torchvision mobilenet_v2": _torchvision(
        "mobilenet_v2", inverted_residual_setting=[[1, 8, 1, 1], [6, 16, 2, 2], [6, 24, 1, 2]]
    ),
    "torchvision mobilenet_v3_small": _torchvision("mobilenet_v3_small", width_mult=0.5),
    "torchvision efficientnet": Case(_efficientnet, lr=CALM),
    "torchvision shufflenet_v2": Case(_shufflenet, lr=CALM),
    "torchvision squeezenet1_1": _torchvision("squeezenet1_1", 0.02),
    "torchvision googlenet": _torchvision("googlenet", 1e-5, aux_logits=False, init_weights=False),
    "torchvision regnet": Case(_regnet, lr=CALM),
    "torchvision densenet": Case(_densenet),
    "torchvision vgg_bn": Case(_vgg_bn),
    "torchvision convnext": Case(_convnext),
    "torchvision swin": Case(_swin),
    "timm vit_tiny": _timm("vit_tiny_patch16_224", 0.02, **SMALL, drop_path_rate=0.2),
    "timm deit_tiny_distilled": _timm("deit_tiny_distilled_patch16_224", 0.02, **SMALL),
    "timm mixer": Case(_mixer),
    "timm resnet10t": _timm("resnet10t"),
    "timm mobilevit_xxs": _timm("mobilevit_xxs"),
    "timm lcnet_035": _timm("lcnet_035"),
    "timm levit": _timm(
        "levit_128s", img_size=32, embed_dim=(16, 32, 32), depth=(1, 1, 1), num_heads=(2, 2, 2)
    ),
    "transformers bert": _transformers("BertForSequenceClassification", "ids", **TEXT),
    "transformers roberta": _transformers("RobertaForSequenceClassification", "ids", **TEXT, pad_token_id=1),
    "transformers electra": _transformers("ElectraForSequenceClassification", "ids", **TEXT),
    "transformers albert": _transformers("AlbertForSequenceClassification", "ids", **TEXT, embedding_size=8),
    "transformers distilbert": _transformers(
        *("DistilBertForSequenceClassification", "ids"),
        vocab_size=VOCABULARY,
        dim=16,
        hidden_dim=16,
        n_layers=2,
        n_heads=2,
    ),
    "transformers gpt2": _transformers(
        *("GPT2ForSequenceClassification", "ids"),
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=2,
        n_head=2,
        pad_token_id=0,
    ),
    "transformers llama": _transformers(
        "LlamaForSequenceClassification", "ids", **TEXT, num_key_value_heads=1, pad_token_id=0
    ),
    "transformers vit": _transformers(
        *("ViTForImageClassification", "images"),
        image_size=32,
        patch_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
    ),
    "transformers resnet": _transformers(
        *("ResNetForImageClassification", "images"),
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
    ),
}


class Own(nn.Module):
    """Convolutions with a layer between them, a mean over places, and a linear layer."""

    def __init__(self, between: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Conv2d(3, 8, 3, 4), between(8), nn.Conv2d(8, 8, 3, 2)
        self.out = nn.Linear(8, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        """Features, shape (B, 8), of images."""
        return self.two(self.norm(self.one(x)).relu()).mean((2, 3))

    def forward(self, x: Tensor) -> Any:
        """Outputs, shape (B, CLASSES)."""
        return self.out(self.features(x))


class MovingCentre(Own):
    """Training moves a centre, a counter, a list and a number, of which outputs depend on all."""

    def __init__(self) -> None:
        super().__init__(nn.Identity)
        self.register_buffer("centre", torch.zeros(8))
        self.register_buffer("hidden", torch.ones(()), persistent=False)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.seen: list[float] = []
        self.level = 0.0

    def features(self, x: Tensor) -> Tensor:
        """Features, shape (B, 8), less their moving mean."""
        found = super().features(x)
        if self.training:
            self.passes += 1
            self.seen.append(float(found.detach().mean()))
            self.level += 0.01
            with torch.no_grad():
                self.centre = 0.9 * self.centre + 0.1 * found.detach().mean(0)  # another tensor each time
                self.hidden.mul_(1.01)
        shift = self.level + 0.001 * int(self.passes) + sum(self.seen) / (1 + len(self.seen))
        return (found - self.centre) * self.hidden + shift


class Teacher(Own):
    """A frozen teacher follows the network as a moving mean, and adds its outputs to it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, CLASSES).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs, shape (B, CLASSES)."""
        found = self.features(x)
        if self.training:
            with torch.no_grad():
                for old, new in zip(self.teacher.parameters(), self.out.parameters(), strict=True):
                    old.mul_(0.9).add_(new, alpha=0.1)
        return self.teacher(found) + self.out(found)


class Tied(nn.Module):
    """A recurrent layer, and outputs through the table of the tokens."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.mix = kind(8, 8, 2, batch_first=True, dropout=0.2)
        self.back = nn.Linear(8, VOCABULARY, bias=False)
        self.back.weight = self.table.weight
        self.out = nn.Linear(VOCABULARY, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        """Outputs, shape (B, CLASSES), of ids, shape (B, TOKENS)."""
        return self.out(self.back(self.mix(self.table(ids))[0][:, -1]))


class Spectral(nn.Module):
    """Layers with spectral norm, by one of torch's two ways."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.one, self.two = norm(nn.Linear(FEATURES, 8)), norm(nn.Linear(8, 8))
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs, shape (B, CLASSES), of rows."""
        return self.out(self.two(self.one(x).tanh()).tanh())


class InPlace(nn.Module):
    """Changes its inputs, what its layers return, and its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.out = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs, shape (B, CLASSES), of rows."""
        x.mul_(2).clamp_(-1, 1)
        found = self.one(x)
        found += 0.5
        return self.out(found.relu_()).mul_(0.5)


class Twice(nn.Module):
    """One layer used twice, and outputs within limits that the start values do not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.same, self.out = nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs, shape (B, CLASSES), of rows."""
        return self.out(self.same(self.same(self.into(x)).relu()).relu()).clamp(-0.8, 0.4)


class SharedStatistics(nn.Module):
    """Two layers of BatchNorm move the same running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.BatchNorm1d(FEATURES), nn.BatchNorm1d(FEATURES)
        self.two.running_mean, self.two.running_var = self.one.running_mean, self.one.running_var
        self.out = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs, shape (B, CLASSES), of rows."""
        return self.out(self.two(self.one(x) + 1))


class OutputsOfTable(nn.Module):
    """The last layer has the table of the tokens as its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mid = nn.Embedding(VOCABULARY, 8, max_norm=2.0), nn.Linear(8, 8)
        self.out = nn.Linear(8, VOCABULARY, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Outputs, shape (B, VOCABULARY), of ids."""
        return self.out(self.mid(self.table(ids)).tanh().mean(1))


class Random(nn.Module):
    """Takes numbers from the streams of Python, NumPy and torch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.mid, self.out = nn.Linear(FEATURES, 8), nn.RReLU(), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs, shape (B, CLASSES), of rows."""
        found = self.mid(self.one(x))
        if self.training:
            found = found * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand())
        return dropout(self.out(found), 0.1, self.training)


class Blocks(nn.Module):
    """Goes through equal blocks in an order of its own, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(3))
        self.out = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs, shape (B, CLASSES), of rows."""
        for number in (2, 0, 1, 0):
            x = self.blocks[number](x)
        return self.out(x)


class PartlyFrozen(Own):
    """The first layer is frozen, and BatchNorm always in evaluation mode, though its scales train."""

    def __init__(self) -> None:
        super().__init__()
        self.one.requires_grad_(False)
        with torch.no_grad():
            self.norm.running_mean.add_(0.1)  # type: ignore[union-attr, operator]

    def train(self, mode: bool = True) -> PartlyFrozen:
        """Choose the mode of all layers but one."""
        super().train(mode)
        self.norm.eval()
        return self


class OwnEvaluation(Own):
    """The first BatchNorm uses the batch in evaluation, too."""

    def eval(self) -> OwnEvaluation:
        """Choose the mode of all layers but one."""
        super().eval()
        self.norm.train()
        return self


class DropoutBesideFrozen(Own):
    """Dropout and a BatchNorm of which nothing trains, after a frozen layer and before one that trains."""

    def __init__(self) -> None:
        super().__init__(lambda width: nn.Sequential(nn.BatchNorm2d(width), nn.Dropout(0.3)))
        self.one.requires_grad_(False)
        self.norm.requires_grad_(False)


class BatchStatistics(nn.Module):
    """Divides features by their spread over the batch, also in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.out = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs, shape (B, CLASSES), of rows."""
        found = self.one(x)
        return self.out((found - found.mean(0)) / (found.std(0, correction=0) + 0.1))


class ScaledGradient(Own):
    """The gradient of its outputs is a tenth of what its loss says."""

    def forward(self, x: Tensor) -> Tensor:
        """Outputs, shape (B, CLASSES)."""
        found = super().forward(x)
        if found.requires_grad:
            found.register_hook(lambda gradient: gradient / 10)
        return found


class LastDropout(Own):
    """Dropout and a bias that begins at zero after the last layer."""

    def __init__(self) -> None:
        super().__init__(partial(nn.GroupNorm, 2))
        self.drop, self.bias = nn.Dropout(0.3), nn.Parameter(torch.zeros(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs, shape (B, CLASSES)."""
        return self.drop(super().forward(x)) + self.bias


class Named(Own):
    """Several outputs in a dictionary, of which `logits` are those of the classes."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Outputs and features."""
        found = self.features(x)
        return {"features": found, "logits": self.out(found)}


Outputs = namedtuple("Outputs", ["embedding", "logits"])


class InATuple(Own):
    """Several outputs in a named tuple."""

    def forward(self, x: Tensor) -> Outputs:
        """Features and outputs."""
        found = self.features(x)
        return Outputs(found, self.out(found))


OWN = {
    "BatchNorm": Case(Own),
    "BatchNorm(momentum=None)": Case(partial(Own, partial(nn.BatchNorm2d, momentum=None))),
    "BatchNorm(affine=False)": Case(partial(Own, partial(nn.BatchNorm2d, affine=False))),
    "BatchNorm(track_running_stats=False)": Case(
        partial(Own, partial(nn.BatchNorm2d, track_running_stats=False))
    ),
    "InstanceNorm(track_running_stats=True)": Case(
        partial(Own, partial(nn.InstanceNorm2d, track_running_stats=True))
    ),
    "GroupNorm": Case(partial(Own, partial(nn.GroupNorm, 2))),
    "a moving centre": Case(MovingCentre),
    "a teacher": Case(Teacher),
    "tied weights and LSTM": Case(partial(Tied, nn.LSTM), "ids"),
    "tied weights and GRU": Case(partial(Tied, nn.GRU), "ids"),
    "spectral norm by hooks": Case(partial(Spectral, spectral_norm), "rows"),
    "spectral norm": Case(partial(Spectral, parametrizations.spectral_norm), "rows", by_function=True),
    "weight norm": Case(partial(Spectral, parametrizations.weight_norm), "rows", by_function=True),
    "in place": Case(InPlace, "rows"),
    "a layer used twice, and a clamp": Case(Twice, "rows", lr=0.2),
    "shared running statistics": Case(SharedStatistics, "rows"),
    "outputs through a table with a largest norm": Case(OutputsOfTable, "ids"),
    "streams of Python and NumPy": Case(Random, "rows"),
    "blocks in an order of its own": Case(Blocks, "rows"),
    "its own train()": Case(PartlyFrozen),
    "its own eval()": Case(OwnEvaluation),
    "dropout beside a frozen part": Case(DropoutBesideFrozen),
    "statistics of the batch": Case(BatchStatistics, "rows"),
    "a hook at the outputs": Case(ScaledGradient),
    "dropout and a bias after the last layer": Case(LastDropout),
    "a dictionary of outputs": Case(Named),
    "a named tuple of outputs": Case(InATuple),
}
