"""Fed-ISIC2019: skin lesions of six hospitals and eight classes, as FLamby prepares it.

  train_test_split                                       FLamby's list: image, target, center, fold2, ...
  ISIC_2019_Training_Input_preprocessed/<image>.jpg      or ISIC_2019_Training_Input/<image>.jpg

The test split is that of each hospital (`fold2`, test_0 to test_5).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rayfed.data.data_config import Resize
from rayfed.data.image_file import read_image
from rayfed.data.named.content import Content, ContentReader, folder_of, stat_hash, with_classes
from rayfed.data.source import Listing, check_inside, read_list
from rayfed.errors import DataError

CENTERS = ("BCN", "HAM_vidir_molemax", "HAM_vidir_modern", "HAM_rosendahl", "MSK", "HAM_vienna_dias")
CLASSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
LIST = "train_test_split"
FOLDERS = ("ISIC_2019_Training_Input_preprocessed", "ISIC_2019_Training_Input")
COLUMNS = ("image", "target", "center", "fold2")
WHERE = (
    "download ISIC_2019_Training_Input from challenge.isic-archive.com/data/#2019 and, from the repository "
    f"owkin/FLamby, flamby/datasets/fed_isic2019/dataset_creation_scripts/{LIST}, and put both into "
    f"data.root, the images also as its script resizes them ({FOLDERS[0]})"
)


@dataclass(frozen=True, kw_only=True)
class FedIsic2019(ContentReader):
    """Reads the listed images; a domain is a hospital."""

    resize: Resize = "squash"

    sparse: ClassVar[bool] = True  # not every hospital has every class

    def fingerprint(self) -> str:
        """A hash of the list, not of the images, as released images do not change."""
        folder = f"{self._images.name}:" if self._images.name != FOLDERS[0] else ""
        return with_classes(
            f"fed_isic2019/1:{folder}{stat_hash([self._root / LIST], self._root)}", self.classes
        )

    def decode(self, listing: Listing, index: int, size: int) -> NDArray[np.uint8]:
        return read_image(self._images / f"{self._image(index)}.jpg", size, self.resize)

    @cached_property
    def _root(self) -> Path:
        return folder_of(self.root, [LIST], WHERE)

    @cached_property
    def _images(self) -> Path:
        present = [self._root / name for name in FOLDERS if (self._root / name).is_dir()]
        return present[0] if present else folder_of(self.root, FOLDERS[:1], WHERE)

    @cached_property
    def _content(self) -> Content:
        rows = sorted(self._rows())
        images = [image for image, _, _, _ in rows]
        if len(set(images)) < len(images):
            raise DataError(f"data.root: {self._root / LIST} lists an image twice; download it again")
        return Content(
            classes=CLASSES,
            labels=np.array([target for _, target, _, _ in rows], dtype=np.int64),
            test=np.array([is_test for _, _, _, is_test in rows], dtype=np.bool_),
            names=[f"{image}.jpg" for image in images],
            images=images,
            domains=CENTERS,
            domain=np.array([center for _, _, center, _ in rows], dtype=np.int64),
        )

    def _rows(self) -> Iterator[tuple[str, int, int, bool]]:
        """Image, class, hospital and whether it is for testing, of each line."""
        path = self._root / LIST
        for number, row in enumerate(csv.DictReader(read_list(path)), 2):
            image, target, center, fold = (str(row.get(column) or "") for column in COLUMNS)
            known = target.isdecimal() and center.isdecimal() and int(center) < len(CENTERS)
            if not known or fold not in (f"train_{center}", f"test_{center}") or int(target) >= len(CLASSES):
                raise DataError(
                    f"data.root: line {number} of {path} has not the columns {', '.join(COLUMNS)} of the "
                    f"release; {WHERE}"
                )
            check_inside(image, f"line {number} of {path}")
            yield image, int(target), int(center), fold.startswith("test")


READER = FedIsic2019
