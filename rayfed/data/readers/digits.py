"""Digit-Five in its public layouts: those of MNIST, USPS, SynthDigits, MNIST-M and SVHN that are present.

The layouts below the root, in the order of the domains:

  MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]   IDX, as torchvision keeps it
  USPS/usps[.t].bz2                                             LIBSVM text, labels 1..10 for digits 0..9
  SynthDigits/synth_{train,test}_32x32.mat                      MATLAB: X (32, 32, 3, N), y (N, 1)
  mnist_m/mnist_m_{train,test}/*.png, ..._labels.txt            files and `<file> <digit>` lines
  SVHN/{train,test}_32x32.mat                                   as SynthDigits, label 10 for digit 0

Or all five as FedBN prepared them and FedGCR uses them (greyscale or colour, any size; labels 0..9):

  {MNIST,USPS,SynthDigits,MNIST_M,SVHN}/partitions/train_part<i>.pkl, .../test.pkl    pickled (images, labels)

Images are read one at a time from their files, or from temporary decompressed copies of these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rayfed.data.formats.array_files import (
    MALFORMED,
    plain_or_packed,
    read_idx,
    read_listed,
    read_mat,
    read_pickles,
    read_usps,
)
from rayfed.data.image_file import open_bounded, to_rgb
from rayfed.data.source import BadImageError, Listing
from rayfed.errors import ConfigError, DataError

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
CLASSES = tuple("0123456789")


@dataclass(frozen=True)
class Part:
    """The training or test split of one domain.

    Attributes:
        domain: Name of the domain.
        is_test: Whether it is the test split.
        paths: Its files; a folder stands for the files in it.
        read: Reads the paths; returns N images (H, W) or (H, W, 3), or paths of image files, and labels (N,).
    """

    domain: str
    is_test: bool
    paths: tuple[Path, ...]
    read: Callable[..., tuple[Any, Labels]]


@dataclass(frozen=True, kw_only=True)
class Digits:
    """Reads every domain that is present below the root; each has an official test split."""

    name: str
    root: str | None

    def fingerprint(self) -> str:
        """A hash of the names, sizes and modification times of all files."""
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
        labels: list[Labels] = []
        domain: list[Labels] = []
        test: list[NDArray[np.bool_]] = []
        for part, (images, digits) in zip(parts, self._content, strict=True):
            half = "test" if part.is_test else "train"
            keys += [f"{part.domain}/{y}/{half}-{i:06d}" for i, y in enumerate(digits)]
            labels.append(digits)
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
            rgb = to_rgb(picture)
        except Exception as err:  # Pillow's decoders raise almost any exception on corrupt files
            name = image if isinstance(image, Path) else listing.keys[index]
            raise BadImageError(
                f"image {name} is corrupt ({err}); replace it, or set data.on_bad_image=skip"
            ) from err
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
        return [_check_part(part) for part in self._parts()]

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        return np.cumsum([0, *(len(images) for images, _ in self._content)])[:-1]


def _layout(root: Path) -> Iterator[Part]:
    """The training and test split of every domain, also of those that are not present."""
    for domain, folder, files in (
        ("mnist", "MNIST", _mnist),
        ("usps", "USPS", _usps),
        ("synth", "SynthDigits", _synth),
        ("mnist_m", "MNIST_M", _mnist_m),
        ("svhn", "SVHN", _svhn),
    ):
        prepared = sorted((root / folder / "partitions").glob("train_part*.pkl"), key=_number)
        for is_test in (False, True):
            if prepared:
                paths = (root / folder / "test.pkl",) if is_test else tuple(prepared)
                yield Part(domain, is_test, paths, read_pickles)
            else:
                yield Part(domain, is_test, *files(root, "test" if is_test else "train"))


def _number(path: Path) -> int:
    digits = path.stem.removeprefix("train_part")
    return int(digits) if digits.isdecimal() else -1


def _mnist(root: Path, half: str) -> tuple[tuple[Path, ...], Callable[..., tuple[Any, Labels]]]:
    idx = "t10k" if half == "test" else half
    stems = (root / "MNIST" / "raw" / f"{idx}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1"))
    return tuple(map(plain_or_packed, stems)), read_idx


def _usps(root: Path, half: str) -> tuple[tuple[Path, ...], Callable[..., tuple[Any, Labels]]]:
    return (root / "USPS" / ("usps.t.bz2" if half == "test" else "usps.bz2"),), read_usps


def _synth(root: Path, half: str) -> tuple[tuple[Path, ...], Callable[..., tuple[Any, Labels]]]:
    return (root / "SynthDigits" / f"synth_{half}_32x32.mat",), read_mat


def _mnist_m(root: Path, half: str) -> tuple[tuple[Path, ...], Callable[..., tuple[Any, Labels]]]:
    stem = f"mnist_m_{half}"
    return (root / "mnist_m" / stem, root / "mnist_m" / f"{stem}_labels.txt"), read_listed


def _svhn(root: Path, half: str) -> tuple[tuple[Path, ...], Callable[..., tuple[Any, Labels]]]:
    return (root / "SVHN" / f"{half}_32x32.mat",), read_mat


def _check_part(part: Part) -> tuple[Any, Labels]:
    where = f"data.root: {part.paths[0]}"
    try:
        images, labels = part.read(*part.paths)
    except OSError as err:
        raise DataError(f"{where} cannot be read ({err})") from err
    except MALFORMED as err:
        raise DataError(f"{where} is not in the format of its release ({err}); download it again") from err
    if len(images) != len(labels) or not len(labels):
        raise DataError(f"{where}: {len(images)} images but {len(labels)} labels")
    if labels.min() < 0 or labels.max() > 9:
        raise DataError(f"{where}: labels from {labels.min()} to {labels.max()}, expected digits")
    return images, labels


READER = Digits
