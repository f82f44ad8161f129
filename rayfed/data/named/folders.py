"""Flowers-102, Food-101, DTD and EuroSAT: folders of image files, listed by torchvision's readers.

flowers-102/{imagelabels.mat,setid.mat}, flowers-102/jpg/image_00001.jpg    test: `tstid`
food-101/meta/{train,test}.json, food-101/images/<class>/<image>.jpg        test: test.json
dtd/dtd/labels/{train1,val1,test1}.txt, dtd/dtd/images/<class>/<image>      test: test1.txt
eurosat/2750/<class>/<image>                                                no official test split
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rayfed.data.data_config import Resize
from rayfed.data.image_file import read_image
from rayfed.data.named.content import Content, ContentReader, folder_of, with_classes
from rayfed.data.source import Listing
from rayfed.errors import DataError

Rows = tuple[Sequence[Path], Sequence[int], Sequence[str]]
"""Paths of the images, their labels, and the names of the classes."""


@dataclass(frozen=True, kw_only=True)
class FileSet(ContentReader):
    """Reads image files that a reader of torchvision lists; a subclass for each data set.

    Attributes:
        official: Name of the class of torchvision that lists the files, where `rows` is not overridden.
        where: What to download and where it must lie, for messages.
        needed: Files and folders below the root without which there is nothing to read.
        halves: Splits that train, and splits that test.
    """

    resize: Resize = "squash"

    official: ClassVar[str]
    where: ClassVar[str]
    needed: ClassVar[tuple[str, ...]]
    halves: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]]

    def fingerprint(self) -> str:
        """A hash of the paths, labels and splits, not of the images, as released images do not change."""
        content = self._content
        rows = zip(content.names, content.labels.tolist(), content.test.tolist(), strict=True)
        text = "\n".join([*content.classes, *(f"{name}\t{label}\t{test}" for name, label, test in rows)])
        return with_classes(f"files/1:{hashlib.sha256(text.encode()).hexdigest()}", self.classes)

    def decode(self, listing: Listing, index: int, size: int) -> NDArray[np.uint8]:
        return read_image(self._image(index), size, self.resize)

    def rows(self, root: str, split: str) -> Rows:
        """The samples of a split, as torchvision lists them."""
        import torchvision

        return _rows_of(getattr(torchvision.datasets, self.official)(root, split))

    @cached_property
    def _content(self) -> Content:
        root = folder_of(self.root, self.needed, self.where)
        train, test = self.halves
        splits = {split: self._rows(root, split) for split in (*train, *test)}
        names = next(iter(splits.values()))[2]
        if len({tuple(own) for _, _, own in splits.values()}) > 1:
            raise DataError(f"data.root: the splits of {self.name} have different classes; {self.where}")
        images = [path for paths, _, _ in splits.values() for path in paths]
        return Content(
            classes=list(names),
            labels=np.array([y for _, labels, _ in splits.values() for y in labels], dtype=np.int64),
            test=np.concatenate([np.full(len(rows[0]), split in test) for split, rows in splits.items()]),
            names=[path.name for path in images],
            images=images,
        )

    def _rows(self, root: Path, split: str) -> Rows:
        try:
            return self.rows(str(root), split)
        except Exception as err:  # torchvision's readers raise almost anything on malformed files
            reason = (str(err).splitlines() or [type(err).__name__])[0]
            raise DataError(f"data.root: {root} is not as released ({reason}); {self.where}") from err


def _rows_of(reader: Any, classes: Sequence[str] | None = None) -> Rows:
    """The paths and labels of a reader of torchvision, which keeps them under these names."""
    return reader._image_files, reader._labels, classes or reader.classes


@dataclass(frozen=True, kw_only=True)
class Flowers102(FileSet):
    """Reads Oxford 102 Flower."""

    needed = ("flowers-102/imagelabels.mat", "flowers-102/setid.mat", "flowers-102/jpg")
    halves = (("train", "val"), ("test",))
    where = (
        "download 102flowers.tgz, imagelabels.mat and setid.mat from "
        "www.robots.ox.ac.uk/~vgg/data/flowers/102 into data.root/flowers-102 and unpack the first one "
        "there, so that data.root/flowers-102/jpg exists"
    )

    def rows(self, root: str, split: str) -> Rows:
        import torchvision

        class Unsigned(torchvision.datasets.Flowers102):  # type: ignore[misc]
            """Reads the lists whatever their checksum is, so that a sample of the data can be used."""

            _file_dict: ClassVar = {
                key: (name, None) for key, (name, _) in torchvision.datasets.Flowers102._file_dict.items()
            }

        return _rows_of(Unsigned(root, split), torchvision.datasets.Flowers102.classes)


@dataclass(frozen=True, kw_only=True)
class Food101(FileSet):
    """Reads Food-101."""

    official = "Food101"
    needed = ("food-101/meta/train.json", "food-101/meta/test.json", "food-101/images")
    halves = (("train",), ("test",))
    where = (
        "download food-101.tar.gz from data.vision.ee.ethz.ch/cvl/datasets_extra/food-101 and unpack it in "
        "data.root, so that data.root/food-101/images exists"
    )


@dataclass(frozen=True, kw_only=True)
class Dtd(FileSet):
    """Reads the Describable Textures Dataset with the first of its ten splits."""

    official = "DTD"
    needed = ("dtd/dtd/labels/train1.txt", "dtd/dtd/labels/test1.txt", "dtd/dtd/images")
    halves = (("train", "val"), ("test",))
    where = (
        "download dtd-r1.0.1.tar.gz from www.robots.ox.ac.uk/~vgg/data/dtd and unpack it in data.root/dtd, "
        "so that data.root/dtd/dtd/images exists"
    )


@dataclass(frozen=True, kw_only=True)
class EuroSat(FileSet):
    """Reads the RGB images of EuroSAT, which have no official test split."""

    needed = ("eurosat/2750",)
    halves = (("all",), ())
    where = (
        "download EuroSAT.zip (RGB) from github.com/phelber/EuroSAT and unpack it in data.root/eurosat, so "
        "that data.root/eurosat/2750 exists"
    )

    def rows(self, root: str, split: str) -> Rows:
        import torchvision

        official = torchvision.datasets.EuroSAT(root)
        return (
            [Path(path) for path, _ in official.samples],
            [label for _, label in official.samples],
            official.classes,
        )
