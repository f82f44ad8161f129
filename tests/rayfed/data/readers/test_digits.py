"""Digit-Five in its public layouts: real files where there are some, else small ones of the same format."""

import bz2
import gzip
import struct

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

import rayfed
from rayfed.data.readers.digits import Digits
from rayfed.errors import ConfigError, DataError


def write_all(root, count=20):
    """Every source, `count` training and half as many test images; image i shows digit i % 10 in a corner."""
    for is_test, number in ((False, count), (True, count // 2)):
        digits = np.arange(number) % 10
        grey = np.zeros((number, 28, 28), np.uint8)
        grey[:, 0, 0] = 20 * digits
        raw, idx = root / "MNIST" / "raw", "t10k" if is_test else "train"
        raw.mkdir(parents=True, exist_ok=True)
        header = struct.pack(">4i", 0x803, number, 28, 28)
        (raw / f"{idx}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + grey.tobytes()))
        (raw / f"{idx}-labels-idx1-ubyte").write_bytes(
            struct.pack(">2i", 0x801, number) + digits.astype(np.uint8).tobytes()
        )
        (root / "USPS").mkdir(exist_ok=True)
        lines = "\n".join(f"{d + 1} 1:{d / 10:.3f} 256:-1" for d in digits) + "\n"
        (root / "USPS" / ("usps.t.bz2" if is_test else "usps.bz2")).write_bytes(bz2.compress(lines.encode()))
        half = "test" if is_test else "train"
        colour = np.zeros((32, 32, 3, number), np.uint8)
        colour[1, 2, 0] = 20 * digits
        for folder, file, zero in (("SynthDigits", f"synth_{half}_32x32", 0), ("SVHN", f"{half}_32x32", 10)):
            (root / folder).mkdir(exist_ok=True)
            labels = np.where(digits == 0, zero, digits)[:, None]
            savemat(root / folder / f"{file}.mat", {"X": colour, "y": labels}, do_compression=True)
        (root / "mnist_m" / f"mnist_m_{half}").mkdir(parents=True, exist_ok=True)
        for i in range(number):
            Image.fromarray(colour[..., i]).save(root / "mnist_m" / f"mnist_m_{half}" / f"{i:08d}.png")
        rows = "".join(f"{i:08d}.png {d}\n" for i, d in enumerate(digits))
        (root / "mnist_m" / f"mnist_m_{half}_labels.txt").write_text(rows)


def test_all_five_sources(tmp_path):
    write_all(tmp_path)
    reader = Digits(name="digits", root=str(tmp_path))
    listing = reader.scan()
    assert listing.domains == ("mnist", "usps", "synth", "mnist_m", "svhn")
    assert listing.classes == tuple("0123456789")
    assert len(listing.labels) == 150
    assert listing.test.sum() == 50
    assert len(set(listing.keys)) == 150
    for place, (y, x) in enumerate([(0, 0), (0, 0), (1, 2), (1, 2), (1, 2)]):
        rows = np.flatnonzero(listing.domain == place)
        assert listing.labels[rows].tolist() == [*(np.arange(20) % 10), *range(10)]
        native = (28, 16, 32, 32, 32)[place]
        for row in rows[[3, 25]]:
            image, digit = reader.decode(listing, row, native), listing.labels[row]
            expected = round((digit / 10 + 1) / 2 * 255) if place == 1 else 20 * digit
            assert image.shape == (native, native, 3)
            assert image[y, x, 0] == expected
        assert reader.decode(listing, int(rows[0]), 32).shape == (32, 32, 3)
    assert reader.fingerprint() == listing.fingerprint


def test_fingerprint_follows_the_files(tmp_path):
    write_all(tmp_path)
    before = Digits(name="digits", root=str(tmp_path)).fingerprint()
    (tmp_path / "mnist_m" / "mnist_m_train" / "00000000.png").unlink()
    assert Digits(name="digits", root=str(tmp_path)).fingerprint() != before


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("USPS/usps.bz2", b"not bz2", "usps.bz2"),
        ("USPS/usps.bz2", bz2.compress(b"11 1:0\n"), "labels"),
        ("MNIST/raw/train-labels-idx1-ubyte", struct.pack(">2i", 0x801, 1) + b"\1", "1 labels"),
        ("MNIST/raw/train-labels-idx1-ubyte", struct.pack(">2i", 7, 1) + b"\1", "magic number"),
        ("SVHN/train_32x32.mat", b"nothing", "not in the format"),
    ],
)
def test_broken_files_are_named(tmp_path, file, content, words):
    write_all(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=words):
        Digits(name="digits", root=str(tmp_path)).scan()


def test_a_root_without_digits_is_explained(tmp_path):
    for root, words in (
        (None, "not set"),
        (str(tmp_path / "no"), "does not exist"),
        (str(tmp_path), "none of"),
    ):
        with pytest.raises(ConfigError, match=f"data.root.*{words}"):
            Digits(name="digits", root=root).scan()


def test_the_real_digits(shared):
    from torchvision.datasets import USPS

    root = shared / "data" / "digits"
    reader = Digits(name="digits", root=str(root))
    listing = reader.scan()
    assert listing.domains == ("mnist", "usps", "mnist_m")
    for place in range(3):
        for half, count in ((False, 200), (True, 50)):
            chosen = (listing.domain == place) & (listing.test == half)
            assert np.bincount(listing.labels[chosen]).tolist() == [count] * 10
    official = USPS(str(root / "USPS"), train=True, download=False)
    rows = np.flatnonzero((listing.domain == 1) & ~listing.test)
    for i in (0, 7, 1999):
        image, label = official[i]
        assert label == listing.labels[rows[i]]
        ours = reader.decode(listing, int(rows[i]), 16)[..., 0].astype(int)
        assert np.abs(ours - np.asarray(image)).max() <= 1  # they truncate, we round


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.parametrize("factor", [1, 10])
def test_fedgcr_on_the_real_digits(shared, tmp_path, cache, factor):
    result = rayfed.simulate(
        [
            "algorithm=fedgcr",
            "data=digits",
            f"data.root={shared / 'data' / 'digits'}",
            f"data.cache={cache}",
            "data.limit=500",
            "data.partition.scheme=imbalanced",
            f"data.partition.factor={factor}",
            "rounds=1",
            "figures=false",
            "cluster=inline",
            "model.options={depth: 2}",
            "model.pretrained=false",
            f"output={tmp_path / 'run'}",
        ]
    )
    assert result.history.clients.iloc[0] == {1: 6, 10: 14}[factor]
