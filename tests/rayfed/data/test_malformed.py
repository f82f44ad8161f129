"""Malformed data files and weights, as a stranger may send them. Add a case by adding a line."""

import bz2
import gzip
import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.io import savemat

from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from tests.rayfed.malformed import Case, assert_refused

PRETRAINED = ("model.options={depth: 1}", "model.pretrained=")


class Attack:
    """Unpickling this would leave a file behind."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def digits(files: dict[str, bytes]):
    """A case's `make`: a folder of Digit-Five's files, by their paths."""

    def make(folder: Path):
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return ["data=digits", f"data.root={folder}"]

    return make


IMAGES, LABELS = "MNIST/raw/train-images-idx3-ubyte", "MNIST/raw/train-labels-idx1-ubyte"


def mnist(header, pack=lambda data: data, suffix=""):
    """One label, 64 pixels, and a header that may promise anything."""
    content = pack(struct.pack(">4i", *header) + b"\0" * 64)
    return digits({f"{IMAGES}{suffix}": content, LABELS: struct.pack(">2i", 0x801, 1) + b"\1"})


def usps(text: bytes):
    return digits({"USPS/usps.bz2": bz2.compress(text)})


def svhn(content):
    def make(folder: Path):
        (folder / "SVHN").mkdir()
        savemat(folder / "SVHN" / "train_32x32.mat", content)
        return ["data=digits", f"data.root={folder}"]

    return make


def mnist_m(text: str):
    return digits({"mnist_m/mnist_m_train_labels.txt": text.encode(), "mnist_m/mnist_m_train/x.png": b""})


def state():
    model = build_backbone(ModelConfig(name="vit_mini", pretrained=False, options={"depth": 1}), 2, 0)
    return {name: value.clone() for name, value in model.net.state_dict().items()}


def weights(change, name="w.safetensors"):
    """A case's `make`: a weight file; `change` gets path and right tensors, and writes the wrong file."""

    def make(folder: Path):
        change(folder / name, state())
        return [PRETRAINED[0], f"{PRETRAINED[1]}{folder / name}"]

    return make


def tensor(key, value):
    """A weight file with one tensor changed, or taken out."""

    def write(path: Path, tensors):
        tensors[key] = value
        save_file({name: v for name, v in tensors.items() if v is not None}, path)

    return weights(write)


def cut(path: Path, tensors):
    save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:-100])


def lying(path: Path, tensors):
    header = json.dumps({"x": {"dtype": "F32", "shape": [10**6, 10**6], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)


def attack(path: Path, tensors):
    torch.save({**tensors, "attack": Attack(path.parent / "attacked")}, path)


def expanded(path: Path, tensors):
    """Gigabytes that are one number, repeated by strides."""
    torch.save({**tensors, "cls_token": torch.zeros(1, dtype=torch.float16).expand(1, 1, 2**40)}, path)


def copied(value):
    return lambda path, tensors: torch.save(value, path)


CASES = [
    # Digit-Five's files.
    Case("more images than the header says", "images-idx3 | the header says", make=mnist((0x803, 1, 4, 4))),
    Case(
        "fewer images than the header says",
        "images-idx3 | the header says",
        make=mnist((0x803, 10**6, 28, 28)),
    ),
    Case("a negative number of images", "images-idx3 | sizes", make=mnist((0x803, -1, 8, 8))),
    Case(
        "images that fill any memory",
        "images-idx3 | the header says",
        make=mnist((0x803, 2**31 - 1, 2**31 - 1, 2**31 - 1)),
    ),
    Case("half a header", "images-idx3 | format", make=digits({IMAGES: b"\0\0", LABELS: b""})),
    Case(
        "half a gzip",
        "images-idx3",
        make=mnist((0x803, 1, 8, 8), pack=lambda data: gzip.compress(data)[:-9], suffix=".gz"),
    ),
    Case(
        "a gzip with damage",
        "images-idx3",
        make=mnist((0x803, 1, 8, 8), pack=lambda data: gzip.compress(data)[:12] + b"\xff" * 30, suffix=".gz"),
    ),
    Case("a pixel beyond the image", "usps.bz2 | pixel 257", make=usps(b"1 257:1\n")),
    Case("a pixel before the image", "usps.bz2 | pixel 0", make=usps(b"1 0:1\n")),
    Case("a pixel that is no number", "usps.bz2 | finite", make=usps(b"1 1:nan\n")),
    Case("an infinite digit", "usps.bz2 | format", make=usps(b"inf 1:0\n")),
    Case(
        "a matrix without labels",
        "train_32x32.mat | no y",
        make=svhn({"X": np.zeros((32, 32, 3, 2), np.uint8)}),
    ),
    Case(
        "a matrix of text",
        "train_32x32.mat | no X",
        make=svhn({"X": np.array([["a"]]), "y": np.array([[1]])}),
    ),
    Case(
        "a matrix of objects",
        "train_32x32.mat | no y",
        make=svhn({"X": np.zeros((32, 32, 3, 1), np.uint8), "y": np.array([[{"a": 1}]], dtype=object)}),
    ),
    Case(
        "a flat matrix",
        "train_32x32.mat | format",
        make=svhn({"X": np.zeros((32, 32), np.uint8), "y": np.array([[1]])}),
    ),
    Case("labels that leave the folder", "mnist_m_train | '../x.png'", make=mnist_m("../x.png 1\n")),
    Case("labels that are words", "mnist_m | format", make=mnist_m("x.png seven\n")),
    # Weights.
    Case(
        "weights that are not there",
        "model.weights | not a file",
        make=lambda folder: [f"model.weights={folder}/w.pth"],
    ),
    Case(
        "a folder as weights",
        "model.weights | not a file",
        make=lambda folder: [f"model.pretrained={folder}"],
    ),
    Case("weights without bytes", "w.pth | state dict", make=weights(lambda path, _: path.touch(), "w.pth")),
    Case(
        "weights of an unknown kind",
        "model.weights | w.onnx",
        make=weights(lambda path, _: path.touch(), "w.onnx"),
    ),
    Case("half a safetensors file", "w.safetensors | state dict", make=weights(cut)),
    Case("a safetensors header that lies", "w.safetensors | state dict", make=weights(lying)),
    Case("a pickle that runs code", "w.pth | state dict", make=weights(attack, "w.pth")),
    Case(
        "a bare pickle that runs code",
        "w.bin | state dict",
        make=weights(
            lambda path, _: path.write_bytes(pickle.dumps(Attack(path.parent / "attacked"))), "w.bin"
        ),
    ),
    Case("a list of tensors", "w.pth | state dict", make=weights(copied([torch.zeros(1)]), "w.pth")),
    Case("a state dict of numbers", "w.pth | names to tensors", make=weights(copied({"a": 1}), "w.pth")),
    Case(
        "a tensor of another shape",
        "'cls_token' | (1, 1, 65) | (1, 1, 64)",
        make=tensor("cls_token", torch.zeros(1, 1, 65)),
    ),
    Case("a tensor that is missing", "'norm.weight' | missing", make=tensor("norm.weight", None)),
    Case("a tensor too many", "'surprise' | unexpected", make=tensor("surprise", torch.zeros(1))),
    Case(
        "a tensor of whole numbers",
        "'norm.weight' | torch.int64 | torch.float32",
        make=tensor("norm.weight", torch.ones(64, dtype=torch.int64)),
    ),
    Case(
        "a complex tensor",
        "'norm.weight' | complex64",
        make=tensor("norm.weight", torch.ones(64, dtype=torch.complex64)),
    ),
    Case(
        "a tensor that is not finite",
        "'norm.bias' | NaN",
        make=tensor("norm.bias", torch.full((64,), float("nan"))),
    ),
    Case("a tensor larger than its file", "'cls_token' | claims", make=weights(expanded, "w.pth")),
    Case(
        "a sparse tensor",
        "'cls_token' | sparse",
        make=weights(
            lambda path, tensors: torch.save(
                {**tensors, "cls_token": torch.ones(1, 1, 64).to_sparse()}, path
            ),
            "w.pth",
        ),
    ),
]


@pytest.mark.filterwarnings("ignore:Validating sparse")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused(case, tmp_path, cache, capsys, monkeypatch):
    assert_refused(case, tmp_path, cache, capsys, monkeypatch)
    assert not list(tmp_path.rglob("attacked")), "code of a stranger was run"
