"""Images in folders with lists of the training and the test images: DomainNet, NICO++, PACS.

  <root>/<domain>_train.txt, <root>/<domain>_test.txt     lines `<path below the root> <label>`

The lists may also be in one of LIST_FOLDERS below the root, and have the endings of PACS, see SUFFIXES. A
path ends with `<domain>/<class>/<image>`; names may contain spaces. Images that are not listed are ignored,
and so are domains without both lists. Classes are in the order of the labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rayfed.data.data_config import Resize
from rayfed.data.image_file import read_image
from rayfed.data.source import Listing, check_inside, choose_classes, read_list
from rayfed.errors import ConfigError, DataError

LAYOUT = "<domain>_train.txt and <domain>_test.txt with lines `<domain>/<class>/<image> <label>`"
LIST_FOLDERS = ("splits", "NICO_DG_official", "Train val splits and h5py files pre-read", ".")
"""Folders of the lists below the root: of FedRA's DomainNet, NICO++, PACS, DomainNet."""
SUFFIXES = (("_train.txt", "_test.txt"), ("_train_kfold.txt", "_crossval_kfold.txt"))
"""Endings of the lists for training and for testing.

`_test_kfold.txt` of PACS is not read, because it lists all images of a domain.
"""


@dataclass(frozen=True, slots=True)
class ListedImage:
    """One line of a list."""

    domain: str
    label: int
    path: str
    is_test: bool

    @property
    def class_name(self) -> str:
        return self.path.rsplit("/", 2)[1]


@dataclass(frozen=True, kw_only=True)
class SplitFiles:
    """Reads listed images; `classes` selects classes by name, or the first ones by number."""

    name: str
    root: str | None
    classes: Sequence[str] | int | None = None
    resize: Resize = "squash"

    def fingerprint(self) -> str:
        """A hash of the lists and the chosen classes, not of the images, as released images do not change."""
        rows, classes = self._chosen
        text = "\n".join([*classes, *(f"{row.path}\t{row.is_test}" for row in rows)])
        return f"split_files/2:{hashlib.sha256(text.encode()).hexdigest()}"

    def scan(self) -> Listing:
        rows, classes = self._chosen
        label = {name: position for position, name in enumerate(classes)}
        domains = sorted({row.domain for row in rows})
        return Listing(
            name=self.name,
            classes=tuple(classes),
            domains=tuple(domains),
            keys=[row.path for row in rows],
            labels=np.array([label[row.class_name] for row in rows], dtype=np.int64),
            domain=np.array([domains.index(row.domain) for row in rows], dtype=np.int64),
            test=np.array([row.is_test for row in rows], dtype=np.bool_),
            fingerprint=self.fingerprint(),
        )

    def decode(self, listing: Listing, index: int, size: int) -> NDArray[np.uint8]:
        return read_image(self._folder() / listing.keys[index], size, self.resize)

    def _folder(self) -> Path:
        if not self.root:
            raise ConfigError(f"data.root: not set; give the folder of {self.name!r}: {LAYOUT}")
        folder = Path(self.root).expanduser().absolute()
        if not folder.is_dir():
            raise DataError(f"data.root: folder {folder} does not exist; expected {LAYOUT}")
        return folder

    @cached_property
    def _chosen(self) -> tuple[list[ListedImage], list[str]]:
        rows = [row for lists in _lists(self._folder()) for row in _read(*lists)]
        if not rows:
            raise DataError(f"data.root: no lists with images in {self._folder()}; expected {LAYOUT}")
        classes = choose_classes(self.classes, _by_label(rows))
        kept = [row for row in rows if row.class_name in set(classes)]
        return sorted(kept, key=lambda row: (row.domain, row.class_name, row.path)), classes


def _lists(root: Path) -> Iterator[tuple[Path, str, bool]]:
    """The lists below the root: path, domain, and whether it lists test images."""
    for folder in LIST_FOLDERS:
        for train, test in SUFFIXES:
            names = sorted(path.name.removesuffix(train) for path in (root / folder).glob(f"*{train}"))
            domains = [name for name in names if (root / folder / f"{name}{test}").is_file()]
            if domains:
                for domain in domains:
                    yield root / folder / f"{domain}{train}", domain, False
                    yield root / folder / f"{domain}{test}", domain, True
                return


def _read(path: Path, domain: str, is_test: bool) -> Iterator[ListedImage]:
    for number, line in enumerate(read_list(path), 1):
        if not line.strip():
            continue
        file, label = [*line.rsplit(maxsplit=1), ""][:2]
        if file.count("/") < 2 or not label.isdecimal():
            raise DataError(f"data.root: line {number} of {path} is not `<domain>/<class>/<image> <label>`")
        check_inside(file, f"line {number} of {path}")
        yield ListedImage(domain, int(label), file, is_test)


def _by_label(rows: Sequence[ListedImage]) -> list[str]:
    """Class names in the order of their labels.

    Raises:
        DataError: A label has two class names, or a class has two labels.
    """
    names: dict[int, str] = {}
    for row in rows:
        if names.setdefault(row.label, row.class_name) != row.class_name:
            raise DataError(
                f"data.root: label {row.label} is {names[row.label]!r}, but {row.path} has the same label"
            )
    if len(set(names.values())) < len(names):
        raise DataError("data.root: the lists give one class two labels; download the lists again")
    return [names[label] for label in sorted(names)]


READER = SplitFiles
