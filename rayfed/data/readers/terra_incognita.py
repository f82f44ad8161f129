"""Terra Incognita: the four camera traps of DomainBed, from DomainBed's folders or from the release.

  <root>/location_{38,43,46,100}/<class>/<image>       as DomainBed builds it
  <root>/eccv_18_annotation_files/*.json               as released (COCO camera traps): images with their
  <root>/eccv_18_all_images_sm/<image>                 locations, annotations, categories

Of the release, only the four locations and ten categories of DomainBed are read. An image with two of the
categories is in both classes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from rayfed.data.readers.image_folder import ImageFolder
from rayfed.data.source import Listing, choose_classes
from rayfed.errors import DataError
from rayfed.user_files import parse_json

LOCATIONS = ("100", "38", "43", "46")
CLASSES = ("bird", "bobcat", "cat", "coyote", "dog", "empty", "opossum", "rabbit", "raccoon", "squirrel")
IMAGES = "eccv_18_all_images_sm"
ANNOTATIONS = "eccv_18_annotation_files"


@dataclass(frozen=True, kw_only=True)
class TerraIncognita(ImageFolder):
    """Reads DomainBed's folders if there are any, else the release."""

    def fingerprint(self) -> str:
        """A hash of the annotation files and the chosen classes; released images do not change.

        For DomainBed's folders it is a hash of all image files.
        """
        if not self._lists:
            return super().fingerprint()
        stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self._lists]
        text = json.dumps([stats, self.classes])
        return f"terra_incognita/1:{hashlib.sha256(text.encode()).hexdigest()}"

    def scan(self) -> Listing:
        if not self._lists:
            return super().scan()
        rows = sorted({row for path in self._lists for row in _read(path)})
        classes = choose_classes(self.classes, sorted({name for _, name, _ in rows}))
        rows = [row for row in rows if row[1] in classes]
        domains = sorted({domain for domain, _, _ in rows})
        if not rows:
            raise DataError(f"data.root: {self._lists[0].parent} lists no image of {', '.join(LOCATIONS)}")
        return Listing(
            name=self.name,
            classes=tuple(classes),
            domains=tuple(domains),
            keys=["/".join(row) for row in rows],
            labels=np.array([classes.index(name) for _, name, _ in rows], dtype=np.int64),
            domain=np.array([domains.index(domain) for domain, _, _ in rows], dtype=np.int64),
            test=np.zeros(len(rows), dtype=np.bool_),
            fingerprint=self.fingerprint(),
        )

    def _path(self, key: str) -> Path:
        if not self._lists:
            return super()._path(key)
        return self._folder() / IMAGES / key.split("/", 2)[2]

    @cached_property
    def _lists(self) -> list[Path]:
        root = self._folder()
        if any((root / f"location_{number}").is_dir() for number in LOCATIONS):
            return []
        return sorted((root / ANNOTATIONS).glob("*.json"))


def _read(path: Path) -> list[tuple[str, str, str]]:
    """Domain, class and file of the images in an annotation file that have a known location and category."""
    try:
        content: dict[str, Any] = parse_json(path.read_bytes())
        names = {item["id"]: item["name"] for item in content["categories"]}
        images = {item["id"]: (str(item["location"]), item["file_name"]) for item in content["images"]}
        pairs = [(images[item["image_id"]], names[item["category_id"]]) for item in content["annotations"]]
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise DataError(f"data.root: {path} is not a COCO camera traps file ({err!r})") from err
    rows = [
        (f"location_{number}", name, file)
        for (number, file), name in pairs
        if number in LOCATIONS and name in CLASSES
    ]
    for _, _, file in rows:
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
            raise DataError(f"data.root: {path} lists {file!r}, which is outside of the folder of images")
    return rows


READER = TerraIncognita
