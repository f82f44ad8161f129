"""The work of each row: sizes, networks and data, the same for every program.

Nothing of RayFed is imported, so that every environment can. A folder of inputs, which
`benchmarks.rivals.inputs` writes, has the examples, the frozen weights, the first trained values, and the
order of the examples of every client in every round.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SPEC, START, ORDERS, COHORTS, FROZEN = (
    "work.json",
    "start.npz",
    "orders.npy",
    "cohorts.npy",
    "frozen.safetensors",
)
IMAGES, LABELS, TEXTS, MODEL = "images.npy", "labels.npy", "texts.csv", "model"


@dataclass(frozen=True)
class Work:
    """The training of a row.

    Attributes:
        name: Name of the row.
        title: What it is, in words.
        clients, cohort: Clients in all, and of a round.
        examples: Examples of a client.
        epochs, batch: Passes over these, and examples of a batch.
        lr, momentum: Of SGD; every client begins without momentum.
        classes: Number of classes.
        size: Side of an image in pixels, or the most tokens of a text.
        rank: Rank of LoRA; 0: the whole network is trained.
        group: RayFed's `train.group`.
        rounds: Rounds whose batches were drawn.
    """

    name: str
    title: str
    clients: int
    cohort: int
    examples: int
    epochs: int
    batch: int
    lr: float
    momentum: float = 0.0
    classes: int = 10
    size: int = 32
    rank: int = 0
    group: int | str = "auto"
    rounds: int = 1

    @property
    def is_text(self) -> bool:
        return self.name == "text"

    @property
    def steps(self) -> int:
        """Optimization steps of a round."""
        return self.cohort * self.epochs * -(-self.examples // self.batch)

    @property
    def rows(self) -> int:
        """Examples in the batches of a round."""
        return self.cohort * self.epochs * self.examples


WORK = {
    each.name: each
    for each in (
        Work("cifar", "pfl's CIFAR-10: 50 of 1,000 clients, 50 images each", 1000, 50, 50, 1, 10, 0.1),
        Work("lenet", "BlazeFL's small CNN: 20 clients, 200 images, 5 epochs", 20, 20, 200, 5, 50, 0.1),
        Work(
            "vit",
            "LoRA on ViT-Ti/16 at 96 pixels: 64 clients, 8 images each",
            *(64, 64, 8, 1, 8, 0.05, 0.9),
            size=96,
            rank=4,
            group=16,
        ),
        Work(
            "text",
            "LoRA on MiniLM-L6: 16 clients, 32 questions of BANKING77 each",
            *(16, 16, 32, 1, 8, 0.05, 0.9),
            classes=77,
            size=128,
            rank=8,
            group=4,
        ),
    )
}


def small(work: Work) -> Work:
    """The same work with few clients and examples: for checks, and for tests."""
    few = {"cifar": (6, 4, 20, 1), "lenet": (4, 4, 60, 2), "vit": (4, 4, 8, 1), "text": (4, 4, 20, 1)}
    clients, cohort, examples, epochs = few[work.name]
    return replace(work, clients=clients, cohort=cohort, examples=examples, epochs=epochs)


def read(folder: Path) -> Work:
    """The work whose inputs are in a folder."""
    return Work(**json.loads((folder / SPEC).read_text()))


def write(folder: Path, work: Work) -> None:
    (folder / SPEC).write_text(json.dumps(asdict(work)))


def names_of_clients(work: Work) -> list[str]:
    """Ids of the clients."""
    return [f"c{k:04d}" for k in range(work.clients)]


def convolutions() -> nn.Module:
    """The network of pfl's CIFAR-10 without dropout: 1,626,442 numbers."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def lenet() -> nn.Module:
    """Two convolutions and three linear layers: 62,006 numbers."""
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


WHOLE = {"cifar": convolutions, "lenet": lenet}
"""Networks that are trained whole."""
TARGETS = {"vit": r"blocks\.\d+\.(attn\.proj|mlp\.fc2)", "text": r".*attention\.self\.(query|value)"}
"""Layers with LoRA, as a regular expression of PEFT."""


def vision_transformer(work: Work) -> nn.Module:
    """ViT-Ti/16 of timm with random weights."""
    from timm import create_model

    return create_model(
        "vit_tiny_patch16_224", pretrained=False, num_classes=work.classes, img_size=work.size
    )


def network(folder: Path) -> nn.Module:
    """The network of a folder of inputs, with its first values; what is not trained needs no gradient."""
    work = read(folder)
    if work.name in WHOLE:
        net: nn.Module = WHOLE[work.name]()
    else:
        from peft import LoraConfig, inject_adapter_in_model

        if work.is_text:
            from transformers import AutoModelForSequenceClassification

            # float32: the file of MiniLM-L6 has half precision, which transformers would keep
            settings = {"num_labels": work.classes, "dtype": torch.float32}
            net = AutoModelForSequenceClassification.from_pretrained(folder / MODEL, **settings)
        else:
            from safetensors.torch import load_file

            net = vision_transformer(work)
            net.load_state_dict(load_file(folder / FROZEN))
        lora = LoraConfig(r=work.rank, lora_alpha=work.rank, target_modules=TARGETS[work.name])
        net = inject_adapter_in_model(lora, net)
        (net.classifier if work.is_text else net.head).requires_grad_(True)
        net.eval()  # a frozen network has no dropout
    put(net, load(folder / START))
    return net


def trained(net: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name."""
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


def arrays(net: nn.Module) -> dict[str, Any]:
    """Copies of their values, as arrays."""
    return {name: p.detach().numpy().copy() for name, p in trained(net).items()}


@torch.no_grad()
def put(net: nn.Module, values: Mapping[str, Any]) -> None:
    """Write trained values, arrays or tensors, into a network."""
    for name, parameter in trained(net).items():
        parameter.copy_(torch.as_tensor(values[name]))


def load(path: Path) -> dict[str, Any]:
    """Arrays by name."""
    with np.load(path) as found:
        return {name: found[name] for name in found.files}


class Examples:
    """The examples of all clients."""

    def __init__(self, folder: Path) -> None:
        self.work = read(folder)
        self.labels = torch.from_numpy(np.load(folder / LABELS))
        if not self.work.is_text:
            self.images = np.load(folder / IMAGES, mmap_mode="r")
            return
        from transformers import AutoTokenizer

        with (folder / TEXTS).open(newline="") as file:
            texts = [row["text"] for row in csv.DictReader(file)]
        tokenizer = AutoTokenizer.from_pretrained(folder / MODEL)
        self.tokens = tokenizer(texts, truncation=True, max_length=self.work.size)["input_ids"]

    def batch(self, client: int, rows: np.ndarray[Any, Any]) -> tuple[Tensor | dict[str, Tensor], Tensor]:
        """Inputs and labels of some examples of a client; texts are padded to the longest of the batch."""
        y = self.labels[client][torch.from_numpy(rows)]
        if self.work.is_text:
            return pad([self.tokens[client * self.work.examples + int(row)] for row in rows]), y
        x = torch.from_numpy(self.images[client][rows]).permute(0, 3, 1, 2).float().div_(255)
        return (x - 0.5) / 0.5 if self.work.name == "vit" else x, y


def pad(texts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Texts as one batch, padded to the longest one (dynamic padding)."""
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    return {"input_ids": ids, "attention_mask": mask}


def loss_of(net: nn.Module, x: Any, y: Tensor) -> Tensor:
    """Cross entropy of a batch."""
    output = net(**x).logits if isinstance(x, dict) else net(x)
    return F.cross_entropy(output, y)


class Order:
    """Who trains in a round, and with which examples."""

    def __init__(self, folder: Path) -> None:
        self.batch = read(folder).batch
        self.cohorts = np.load(folder / COHORTS)
        self.orders = np.load(folder / ORDERS, mmap_mode="r")

    def cohort(self, round: int) -> list[int]:
        """Numbers of the clients of a round, from 0."""
        return [int(client) for client in self.cohorts[round]]

    def batches(self, round: int, client: int) -> list[np.ndarray[Any, Any]]:
        """Rows of the examples of each batch of a client of this round."""
        place = self.cohort(round).index(client)
        return [
            epoch[i : i + self.batch].astype(np.int64)
            for epoch in self.orders[round, place]
            for i in range(0, len(epoch), self.batch)
        ]
