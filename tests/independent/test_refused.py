"""Networks that RayFed refuses before anything starts, and why; with some plain PyTorch could go on."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from rayfed.errors import ConfigError
from tests.conftest import STEADY
from tests.independent.networks import CLASSES, FEATURES, TEXT, VOCABULARY, Case, Spectral
from tests.independent.test_networks import network, run_of


class Rows(nn.Module):
    """A linear layer, and what is made beside it."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **made: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, CLASSES)
        self.steps = forward
        for name, make in made.items():
            value = make(self.out)
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        """What the function says."""
        return self.steps(self, x)


def rows(forward: Callable[[Any, Tensor], Any], **made: Callable[[nn.Module], Any]) -> Case:
    return Case(partial(Rows, forward, **made), "rows")


def plain(net: Any, x: Tensor) -> Tensor:
    return net.out(x)


def grows(net: Any, x: Tensor) -> Tensor:
    net.past = torch.cat([net.past, x.detach()])
    return net.out(x)


def turns(net: Any, x: Tensor) -> Tensor:
    net.phase = net.phase * 0.9 + 1j * x.detach().mean(0)
    return net.out(x + net.phase.real)


def makes(net: Any, x: Tensor) -> Tensor:
    if not hasattr(net, "scale"):
        net.register_buffer("scale", x.detach().abs().mean())
    return net.out(x / net.scale)


def begins(net: Any, x: Tensor) -> Tensor:
    if not net.ready:
        with torch.no_grad():
            net.out.bias.copy_(-x.mean(0)[:CLASSES])
            net.ready.fill_(True)
    return net.out(x)


def sometimes(net: Any, x: Tensor) -> Tensor:
    return net.out(x) + (net.other(x) if len(x) > 100 else 0)


def without_gradient(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return net.out(x)


class NoParameters(nn.Module):
    """Returns its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        """The first numbers of each row."""
        return x[:, :CLASSES]


class Recurrent(nn.Module):
    """Returns what nn.LSTM returns."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(VOCABULARY, 4), nn.LSTM(4, CLASSES, batch_first=True)

    def forward(self, ids: Tensor) -> Any:
        """Outputs for each token, and the states."""
        return self.mix(self.table(ids))


def _transformers(kind: str, takes: str, **options: Any) -> Case:
    def make() -> nn.Module:
        import transformers

        network = getattr(transformers, kind)
        return network(network.config_class(**options))

    return Case(make, takes)


def _torchvision(name: str, **options: Any) -> Case:
    def make() -> nn.Module:
        from torchvision import models

        return models.get_model(name, weights=None, num_classes=CLASSES, **options)

    return Case(make)


def _timm(name: str, **options: Any) -> Case:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, **options)

    return Case(make)


CLIP = {
    "text_config": {**TEXT, "hidden_size": 16},
    "vision_config": {**TEXT, "image_size": 32, "patch_size": 8},
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2, "num_labels": CLASSES}
EMBEDDING = r"cannot be computed from outputs of shape \(2, 10, \d+\) and targets of shape \(2,\)"
NO_GRADIENT = "would be trained and gets no gradient, because the output does not depend on it"
REFUSED = {
    # name: (network, what the message says)
    "a buffer that grows": (
        rows(grows, past=lambda _: torch.zeros(0, FEATURES)),
        "gets another shape or type",
    ),
    "a complex buffer that moves": (
        rows(turns, phase=lambda _: torch.zeros(FEATURES, dtype=torch.complex64)),
        "phase of .* is complex",
    ),
    "a buffer that is made in a pass": (
        rows(makes),
        "makes 'scale' in its first forward",
    ),
    "start values from the first batch": (
        rows(begins, ready=lambda _: torch.tensor(False)),
        r"write into the trained out.bias until 'ready' says that it was done, .* pass a batch through",
    ),
    "an unused layer": (rows(plain, other=lambda _: nn.Linear(2, 2)), NO_GRADIENT),
    "a layer used sometimes": (rows(sometimes, other=lambda _: nn.Linear(FEATURES, CLASSES)), NO_GRADIENT),
    "no gradient": (
        rows(without_gradient),
        r"does not depend on any trained parameter .* torch\.no_grad\(\)",
    ),
    "all frozen": (
        Case(lambda: nn.Linear(FEATURES, CLASSES).requires_grad_(False), "rows"),
        "does it train nothing",
    ),
    "no parameters": (Case(NoParameters, "rows"), "has no parameters"),
    "no values": (Case(partial(nn.Linear, FEATURES, CLASSES, device="meta"), "rows"), "on the meta device"),
    "an optimizer in it": (
        rows(plain, steps_of=lambda out: torch.optim.SGD(out.parameters(), 0.1)),
        "is an optimizer; clients make their own",
    ),
    "a lock in it": (rows(plain, lock=lambda _: threading.Lock()), "give a function that makes it"),
    "torch.jit.script": (
        Case(lambda: torch.jit.script(nn.Linear(FEATURES, CLASSES)), "rows"),
        "cannot be sent to other processes",
    ),
    "a parametrization, without a function that makes it": (
        Case(partial(Spectral, parametrizations.spectral_norm), "rows"),
        "give a function that makes it",
    ),
    "two tensors": (rows(lambda net, x: (net.out(x), x.sum(1))), "return the outputs alone"),
    "one output for a batch": (
        rows(lambda net, x: net.out(x).mean(0)),
        "the first dimension must be that of the examples",
    ),
    "too few classes": (
        Case(partial(nn.Linear, FEATURES, 3), "rows"),
        "has 3 outputs, and the targets have 4",
    ),
    "float64": (Case(lambda: nn.Linear(FEATURES, CLASSES).double(), "rows"), "Float and Double"),
    "an output for each token": (Case(Recurrent, "ids"), EMBEDDING),
    "torchvision googlenet with its auxiliary outputs": (
        _torchvision("googlenet", init_weights=False),
        NO_GRADIENT,
    ),
    "torchvision inception_v3 on small images": (
        _torchvision("inception_v3", init_weights=False, aux_logits=False),
        r"does not take inputs of shape \(3, 32, 32\)",
    ),
    "timm features_only": (_timm("resnet10t", features_only=True), "return the outputs alone"),
    "timm vit for larger images": (
        _timm("vit_tiny_patch16_224", embed_dim=32, depth=1, num_heads=2, num_classes=CLASSES),
        r"Input height \(32\) doesn't match model",
    ),
    "transformers bert without a classifier": (_transformers("BertModel", "ids", **TEXT), EMBEDDING),
    "transformers bert for tokens": (
        _transformers("BertForTokenClassification", "ids", **TEXT, num_labels=CLASSES),
        EMBEDDING,
    ),
    "transformers clip, which needs texts as well": (
        _transformers("CLIPModel", "images", **CLIP),
        "does not take inputs",
    ),
    "transformers gpt2 without a padding token": (
        _transformers("GPT2ForSequenceClassification", "ids", **GPT2),
        "no padding token is defined",
    ),
}
"""Of each network, why: the reason that the user reads."""
SLOW = [name for name in REFUSED if name.startswith(("torchvision", "timm", "transformers"))]


@pytest.mark.parametrize("name", [pytest.param(n, marks=STEADY if n in SLOW else ()) for n in REFUSED])
def test_a_network_is_refused_with_the_reason(name):
    case, why = REFUSED[name]
    network(case)
    with pytest.raises(ConfigError, match=why) as caught:
        run_of(case)
    assert "\n" not in str(caught.value)
