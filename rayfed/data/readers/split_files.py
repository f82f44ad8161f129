"""DomainNet as released: images in folders, and lists that say which are for training and which for testing.

  <root>/<domain>/<class>/<image>
  <root>/<domain>_train.txt, <root>/<domain>_test.txt     lines `<domain>/<class>/<image> <label>`

The lists may also be in `<root>/splits/`. Only listed images count; domains are those that have both lists.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rayfed.data.readers.image_folder import read_image
from rayfed.data.source import Listing, check_inside, read_list
from rayfed.errors import ConfigError, DataError

LAYOUT = "<root>/<domain>_train.txt and <domain>_test.txt with lines `<domain>/<class>/<image> <label>`"


@dataclass(frozen=True)
class Row:
    """One line of a list."""

    domain: str
    is_test: bool
    path: str

    @property
    def class_name(self) -> str:
        return self.path.split("/")[1]


@dataclass(frozen=True, kw_only=True)
class SplitFiles:
    """Reads lists of images; classes in alphabetical order, those of `classes` only where it is given."""

    name: str
    root: str | None
    classes: list[str] | None = None

    def fingerprint(self) -> str:
        """Of the lists and the chosen classes: released images do not change."""
        text = "\n".join(f"{r.path}\t{r.is_test}" for r in self._rows)
        return f"split_files/1:{hashlib.sha256(text.encode()).hexdigest()}"

    def scan(self) -> Listing:
        rows = self._rows
        found = {row.class_name for row in rows}
        classes = sorted(found) if self.classes is None else self.classes
        domains = sorted({row.domain for row in rows})
        return Listing(
            name=self.name,
            classes=tuple(classes),
            domains=tuple(domains),
            keys=[row.path for row in rows],
            labels=np.array([classes.index(row.class_name) for row in rows], dtype=np.int64),
            domain=np.array([domains.index(row.domain) for row in rows], dtype=np.int64),
            test=np.array([row.is_test for row in rows], dtype=np.bool_),
            fingerprint=self.fingerprint(),
        )

    def decode(self, listing: Listing, index: int, size: int) -> NDArray[np.uint8]:
        return read_image(self._folder() / listing.keys[index], size)

    def _folder(self) -> Path:
        if not self.root:
            raise ConfigError(f"data.root: not set; give the folder of {self.name!r}: {LAYOUT}")
        folder = Path(self.root).expanduser().absolute()
        if not folder.is_dir():
            raise DataError(f"data.root: folder {folder} does not exist; expected {LAYOUT}")
        return folder

    @cached_property
    def _rows(self) -> list[Row]:
        root = self._folder()
        lists = root / "splits" if (root / "splits").is_dir() else root
        names = (path.name.removesuffix("_train.txt") for path in lists.glob("*_train.txt"))
        domains = sorted(name for name in names if (lists / f"{name}_test.txt").is_file())
        rows = []
        for domain in domains:
            for half in ("train", "test"):
                rows += _read(lists / f"{domain}_{half}.txt", domain, half == "test", self.classes)
        if not rows:
            raise DataError(f"data.root: no lists with images in {lists}; expected {LAYOUT}")
        return sorted(rows, key=lambda row: (row.domain, row.class_name, row.path))


def _read(path: Path, domain: str, is_test: bool, classes: list[str] | None) -> list[Row]:
    rows = []
    for number, line in enumerate(read_list(path), 1):
        if not line.strip():
            continue
        file = line.rsplit(maxsplit=1)[0]
        if file.count("/") < 2:
            raise DataError(f"data.root: line {number} of {path} is not `<domain>/<class>/<image> <label>`")
        check_inside(file, f"line {number} of {path}")
        row = Row(domain, is_test, file)
        if classes is None or row.class_name in classes:
            rows.append(row)
    return rows


READER = SplitFiles
