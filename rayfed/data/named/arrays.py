"""CIFAR-10, CIFAR-100, Fashion-MNIST and SVHN: published files of arrays, laid out as torchvision reads them.

  cifar-10-batches-py/{data_batch_1..5,test_batch,batches.meta}      pickled arrays
  cifar-100-python/{train,test,meta}                                 pickled arrays
  FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte      IDX, also .gz
  {train,test}_32x32.mat                                             MATLAB: X, y; label 10 for digit 0

File names and class names are torchvision's. Its readers are not used for these, because they accept the
files of the release only (by checksum) and hold all images in memory. Here only arrays are loaded from
pickles, and a sample of the data in the same format is read, too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rayfed.data.formats.array_files import (
    MALFORMED,
    StoredImages,
    load_arrays,
    plain_or_packed,
    read_idx,
    read_mat,
    spool,
)
from rayfed.data.named.content import Content, ContentReader, folder_of, stat_hash, with_classes
from rayfed.data.source import Listing
from rayfed.errors import DataError

SIDE = 32


def read_cifar(paths: Sequence[Path]) -> tuple[StoredImages, NDArray[np.int64]]:
    """Read batches: pickled dictionaries with `data` and `labels` or, in CIFAR-100, `fine_labels`.

    `data` has a row for each image: 32 x 32 red values in row-major order, then as many green and blue ones.

    Returns:
        Images, N of shape (32, 32, 3), uint8, and labels, int64, shape (N,).

    Raises:
        ValueError: A file holds something else.
    """
    labels: list[NDArray[np.int64]] = []

    def pieces() -> Iterator[NDArray[np.uint8]]:
        for path in paths:
            batch = _dictionary(path)
            data = np.asarray(batch["data"])
            own = np.asarray(batch["labels" if "labels" in batch else "fine_labels"]).astype(np.int64)
            if data.dtype != np.uint8 or data.shape != (len(own), 3 * SIDE * SIDE):
                raise ValueError(f"{path.name}: {data.dtype} {data.shape} with {len(own)} labels")
            labels.append(own)
            yield np.ascontiguousarray(data.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1))

    images = spool(pieces(), (SIDE, SIDE, 3))
    return images, np.concatenate(labels)


def read_class_names(path: Path, key: str) -> list[str]:
    """Read the names of the classes: a list of text under `key`.

    Raises:
        ValueError: There is no such list.
    """
    names = _dictionary(path).get(key)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"it has no list of names {key!r}")
    return names


def _dictionary(path: Path) -> dict[str, Any]:
    content = load_arrays(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no dictionary")  # noqa: TRY004  (all malformed files raise ValueError)
    return content


Half = tuple[Any, NDArray[np.int64]]
"""Images, N of shape (H, W) or (H, W, 3), uint8, and labels, shape (N,)."""


@dataclass(frozen=True, kw_only=True)
class ArraySet(ContentReader):
    """Reads a data set of small images with an official test split; a subclass for each layout.

    Attributes:
        where: What to download and where it must lie, for messages.
    """

    where: ClassVar[str]

    def fingerprint(self) -> str:
        """A hash of the names, sizes and modification times of all files."""
        files = chain(*self._files.values())
        return with_classes(f"arrays/1:{stat_hash(files, self._root)}", self.classes)

    def decode(self, listing: Listing, index: int, size: int) -> NDArray[np.uint8]:
        half, place = self._image(index)
        image = Image.fromarray(self._halves[half][0][place]).convert("RGB")
        same = image.size == (size, size)
        return np.asarray(image if same else image.resize((size, size), Image.Resampling.BILINEAR))

    @abstractmethod
    def files(self) -> dict[str, list[str]]:
        """The files below the root, by `train`, `test` and, if there is such a file, `classes`."""

    @abstractmethod
    def read(self, paths: Sequence[Path]) -> Half:
        """Read the files of one half; raises one of MALFORMED where they are malformed."""

    @abstractmethod
    def class_names(self, paths: Sequence[Path]) -> Sequence[str]:
        """Names of the classes, from the file of the classes if there is one."""

    @cached_property
    def _root(self) -> Path:
        return folder_of(self.root, [], self.where)

    @cached_property
    def _files(self) -> dict[str, list[Path]]:
        paths = {
            half: [plain_or_packed(self._root / name) for name in names]
            for half, names in self.files().items()
        }
        folder_of(
            self.root, [str(path.relative_to(self._root)) for path in chain(*paths.values())], self.where
        )
        return paths

    @cached_property
    def _halves(self) -> dict[str, Half]:
        return {half: self._check_arrays(half, self.read) for half in ("train", "test")}

    @cached_property
    def _content(self) -> Content:
        images = [(half, place) for half, (own, _) in self._halves.items() for place in range(len(own))]
        return Content(
            classes=list(self._check_arrays("classes", self.class_names)),
            labels=np.concatenate([labels for _, labels in self._halves.values()]),
            test=np.array([half == "test" for half, _ in images], dtype=np.bool_),
            names=[f"{half}-{place:06d}" for half, place in images],
            images=images,
        )

    def _check_arrays(self, half: str, read: Any) -> Any:
        paths = self._files.get(half, [])
        try:
            return read(paths)
        except OSError as err:
            raise DataError(f"data.root: {paths[0]} cannot be read ({err})") from err
        except MALFORMED as err:
            raise DataError(
                f"data.root: {paths[0]} is not in the format of its release ({err}); {self.where}"
            ) from err


@dataclass(frozen=True, kw_only=True)
class Cifar(ArraySet):
    """Reads the Python version of CIFAR-10 or CIFAR-100."""

    official: ClassVar[str]
    """Name of the class of torchvision that has the names of the files."""

    def files(self) -> dict[str, list[str]]:
        import torchvision

        official = getattr(torchvision.datasets, self.official)
        files = {
            "train": [name for name, _ in official.train_list],
            "test": [name for name, _ in official.test_list],
            "classes": [official.meta["filename"]],
        }
        return {half: [f"{official.base_folder}/{name}" for name in names] for half, names in files.items()}

    def read(self, paths: Sequence[Path]) -> Half:
        return read_cifar(paths)

    def class_names(self, paths: Sequence[Path]) -> Sequence[str]:
        import torchvision

        return read_class_names(paths[0], getattr(torchvision.datasets, self.official).meta["key"])


def _unpack(archive: str, first: str) -> str:
    return (
        f"download {archive} from www.cs.toronto.edu/~kriz/cifar.html and unpack it in data.root, so that "
        f"data.root/{first} exists"
    )


@dataclass(frozen=True, kw_only=True)
class Cifar10(Cifar):
    """Reads CIFAR-10."""

    official = "CIFAR10"
    where = _unpack("cifar-10-python.tar.gz", "cifar-10-batches-py/data_batch_1")


@dataclass(frozen=True, kw_only=True)
class Cifar100(Cifar):
    """Reads CIFAR-100 with its fine labels."""

    official = "CIFAR100"
    where = _unpack("cifar-100-python.tar.gz", "cifar-100-python/train")


@dataclass(frozen=True, kw_only=True)
class FashionMnist(ArraySet):
    """Reads Fashion-MNIST."""

    where = (
        "download the four files of github.com/zalandoresearch/fashion-mnist into "
        "data.root/FashionMNIST/raw, so that data.root/FashionMNIST/raw/train-images-idx3-ubyte.gz exists"
    )

    def files(self) -> dict[str, list[str]]:
        kinds = ("images-idx3", "labels-idx1")
        halves = {"train": "train", "test": "t10k"}
        return {
            half: [f"FashionMNIST/raw/{stem}-{kind}-ubyte" for kind in kinds] for half, stem in halves.items()
        }

    def read(self, paths: Sequence[Path]) -> Half:
        return _equal(*read_idx(*paths))

    def class_names(self, paths: Sequence[Path]) -> Sequence[str]:
        import torchvision

        return torchvision.datasets.FashionMNIST.classes


@dataclass(frozen=True, kw_only=True)
class Svhn(ArraySet):
    """Reads the cropped digits of SVHN, without the extra images."""

    where = (
        "download train_32x32.mat and test_32x32.mat (format 2) from ufldl.stanford.edu/housenumbers into "
        "data.root, so that data.root/train_32x32.mat exists"
    )

    def files(self) -> dict[str, list[str]]:
        return {half: [f"{half}_32x32.mat"] for half in ("train", "test")}

    def read(self, paths: Sequence[Path]) -> Half:
        return _equal(*read_mat(paths[0]))

    def class_names(self, paths: Sequence[Path]) -> Sequence[str]:
        return [str(digit) for digit in range(10)]


def _equal(images: Any, labels: NDArray[np.int64]) -> Half:
    if len(images) != len(labels):
        raise ValueError(f"{len(images)} images but {len(labels)} labels")
    return images, labels
