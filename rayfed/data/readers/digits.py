"""Digit-Five in its public layouts: MNIST, USPS, SynthDigits, MNIST-M and SVHN, those that are there.

Below the root, in this order of domains:

  MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]   IDX, as torchvision keeps it
  USPS/usps[.t].bz2                                             LIBSVM text, labels 1..10 for digits 0..9
  SynthDigits/synth_{train,test}_32x32.mat                      MATLAB: X (32, 32, 3, N), y (N, 1)
  mnist_m/mnist_m_{train,test}/*.png, ..._labels.txt            files and `<file> <digit>` lines
  SVHN/{train,test}_32x32.mat                                   as SynthDigits, label 10 for digit 0
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import math
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rayfed.data.readers.image_folder import open_bounded
from rayfed.data.source import BadImageError, Listing, check_inside, read_list
from rayfed.errors import ConfigError, DataError

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
CLASSES = tuple("0123456789")

MAX_BYTES = 4_000_000_000
"""Most that a file may unpack to; the largest of the public files, SVHN's `extra`, has 1.6 GB."""

MALFORMED = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    OverflowError,
    struct.error,
    zlib.error,
    EOFError,
    NotImplementedError,
)
"""What parsers raise on bytes that are not in their format."""


@dataclass(frozen=True)
class Part:
    """The training or test half of one source.

    Attributes:
        domain: Name of the domain.
        is_test: Which half.
        paths: Its files; a folder counts as the files in it.
        read: From the paths to images (N, H, W) or (N, H, W, 3), or paths of image files, and labels (N,).
    """

    domain: str
    is_test: bool
    paths: tuple[Path, ...]
    read: Callable[..., tuple[Any, Labels]]


@dataclass(frozen=True, kw_only=True)
class Digits:
    """Reads every source that its root holds; each has an official test split."""

    name: str
    root: str | None

    def fingerprint(self) -> str:
        """Of the names, sizes and times of all files."""
        out = hashlib.sha256()
        for part in self._parts():
            for path in part.paths:
                for file in sorted(path.iterdir()) if path.is_dir() else (path,):
                    stat = file.stat()
                    out.update(f"{part.domain}/{file.name}\t{stat.st_size}\t{stat.st_mtime_ns}\n".encode())
        return f"digits/1:{out.hexdigest()}"

    def scan(self) -> Listing:
        parts = self._parts()
        domains = tuple(dict.fromkeys(part.domain for part in parts))
        keys: list[str] = []
        labels, domain, test = [], [], []
        for part, (images, found) in zip(parts, self._content, strict=True):
            half = "test" if part.is_test else "train"
            keys += [f"{part.domain}/{y}/{half}-{i:06d}" for i, y in enumerate(found)]
            labels.append(found)
            domain.append(np.full(len(images), domains.index(part.domain), dtype=np.int64))
            test.append(np.full(len(images), part.is_test))
        return Listing(
            name=self.name,
            classes=CLASSES,
            domains=domains,
            keys=keys,
            labels=np.concatenate(labels),
            domain=np.concatenate(domain),
            test=np.concatenate(test),
            fingerprint=self.fingerprint(),
        )

    def decode(self, listing: Listing, index: int, size: int) -> Images:
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        image = self._content[part][0][index - int(self._starts[part])]
        try:
            picture = open_bounded(image) if isinstance(image, Path) else Image.fromarray(image)
            rgb = picture.convert("RGB")
        except Exception as error:  # Pillow's decoders raise almost anything on corrupt input
            raise BadImageError(
                f"image {image} is corrupt ({error}); or set data.on_bad_image=skip"
            ) from error
        same = rgb.size == (size, size)
        return np.asarray(rgb if same else rgb.resize((size, size), Image.Resampling.BILINEAR))

    def _parts(self) -> list[Part]:
        if not self.root:
            raise ConfigError(f"data.root: not set; give the folder of {self.name!r} with MNIST, USPS, ...")
        root = Path(self.root).expanduser().absolute()
        if not root.is_dir():
            raise DataError(f"data.root: folder {root} does not exist; give the folder with MNIST, USPS, ...")
        parts = [part for part in _layout(root) if all(path.exists() for path in part.paths)]
        if not parts:
            raise DataError(f"data.root: {root} holds none of MNIST, USPS, SynthDigits, mnist_m, SVHN")
        return parts

    @cached_property
    def _content(self) -> list[tuple[Any, Labels]]:
        return [_checked(part) for part in self._parts()]

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        return np.cumsum([0, *(len(images) for images, _ in self._content)])[:-1]


def _layout(root: Path) -> Iterator[Part]:
    """Every half of every source, whether it is there or not."""
    for is_test, idx in ((False, "train"), (True, "t10k")):
        stems = (root / "MNIST" / "raw" / f"{idx}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1"))
        yield Part("mnist", is_test, tuple(map(_or_gzip, stems)), read_idx)
    for is_test, file in ((False, "usps.bz2"), (True, "usps.t.bz2")):
        yield Part("usps", is_test, (root / "USPS" / file,), read_usps)
    for is_test, half in ((False, "train"), (True, "test")):
        yield Part("synth", is_test, (root / "SynthDigits" / f"synth_{half}_32x32.mat",), read_mat)
    for is_test, half in ((False, "train"), (True, "test")):
        stem = f"mnist_m_{half}"
        paths = (root / "mnist_m" / stem, root / "mnist_m" / f"{stem}_labels.txt")
        yield Part("mnist_m", is_test, paths, read_listed)
    for is_test, half in ((False, "train"), (True, "test")):
        yield Part("svhn", is_test, (root / "SVHN" / f"{half}_32x32.mat",), read_mat)


def _or_gzip(path: Path) -> Path:
    packed = path.with_name(f"{path.name}.gz")
    return packed if packed.exists() and not path.exists() else path


def _checked(part: Part) -> tuple[Any, Labels]:
    where = f"data.root: {part.paths[0]}"
    try:
        images, labels = part.read(*part.paths)
    except OSError as error:
        raise DataError(f"{where} cannot be read ({error})") from error
    except MALFORMED as error:
        raise DataError(f"{where} is not in the format of its release ({error})") from error
    if len(images) != len(labels) or not len(labels):
        raise DataError(f"{where}: {len(images)} images but {len(labels)} labels")
    if labels.min() < 0 or labels.max() > 9:
        raise DataError(f"{where}: labels from {labels.min()} to {labels.max()}, expected digits")
    return images, labels


def read_idx(images: Path, labels: Path) -> tuple[Images, Labels]:
    """Two IDX files: a magic number, the sizes as big-endian int32, then bytes."""
    return _idx(images, 3), _idx(labels, 1).astype(np.int64)


def _idx(path: Path, rank: int) -> Images:
    data = _unpacked(path)
    magic, *shape = struct.unpack_from(f">{rank + 1}i", data)
    if magic != 0x0800 + rank:
        raise ValueError(f"magic number {magic}, expected {0x0800 + rank}")
    start = 4 * (rank + 1)
    if min(shape) < 1 or math.prod(shape) != len(data) - start:
        raise ValueError(f"the header promises {shape} bytes, {len(data) - start} are there")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _unpacked(path: Path) -> bytes:
    """The content of a file that may be packed, which must not unpack to more than MAX_BYTES."""
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open}
    with openers.get(path.suffix, open)(path, "rb") as file:
        data: bytes = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it unpacks to more than {MAX_BYTES // 1_000_000} MB")
    return data


def read_usps(path: Path) -> tuple[Images, Labels]:
    """LIBSVM text: `<label> <index>:<value> ...`, values in -1..1 (absent: 0), 16 x 16 pixels."""
    lines = _unpacked(path).decode("ascii").splitlines()
    rows, labels = np.zeros((len(lines), 256)), np.empty(len(lines), dtype=np.int64)
    for row, line in enumerate(lines):
        label, *pairs = line.split()
        labels[row] = int(float(label)) - 1
        for pair in pairs:
            place, value = pair.split(":")
            if not 1 <= int(place) <= 256:
                raise ValueError(f"line {row + 1} has a pixel {place}, there are 256")
            rows[row, int(place) - 1] = float(value)
    if not np.isfinite(rows).all():
        raise ValueError("a pixel is not a finite number")
    pixels = np.clip((rows + 1) / 2 * 255 + 0.5, 0, 255)
    return pixels.astype(np.uint8).reshape(-1, 16, 16), labels


def read_mat(path: Path) -> tuple[Images, Labels]:
    """MATLAB file with X, shape (32, 32, 3, N), and y; 10 stands for digit 0."""
    from scipy.io import loadmat, whosmat

    try:
        shapes = {name: shape for name, shape, _ in whosmat(path)}
        fits = math.prod(shapes.get("X", ())) <= MAX_BYTES
        content = loadmat(path, variable_names=["X", "y"] if fits else [])
    except Exception as error:  # scipy raises many things on corrupt input
        raise ValueError(error) from error
    if not fits:
        raise ValueError(f"X has more than {MAX_BYTES // 1_000_000} million values")
    if content["X"].dtype.kind not in "uif" or content["y"].dtype.kind not in "uif":
        raise ValueError(f"X is {content['X'].dtype} and y is {content['y'].dtype}, expected numbers")
    labels = content["y"].astype(np.int64).reshape(-1) % 10
    return np.ascontiguousarray(np.transpose(content["X"], (3, 0, 1, 2))).astype(np.uint8), labels


def read_listed(folder: Path, listing: Path) -> tuple[list[Path], Labels]:
    """Image files with their digits: `<file> <digit>` a line."""
    rows = sorted(line.split() for line in read_list(listing) if line.strip())
    for file, _ in rows:
        check_inside(file, str(listing))
    return [folder / file for file, _ in rows], np.array([int(digit) for _, digit in rows], dtype=np.int64)


READER = Digits
