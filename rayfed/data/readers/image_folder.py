"""Images in folders `root/<domain>/<class>/**/<image>`: PACS, OfficeHome, VLCS, DomainNet as released."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rayfed.data.source import BadImageError, Listing
from rayfed.errors import ConfigError, DataError

LAYOUT = "<root>/<domain>/<class>/<image>"
MAX_PIXELS = 89_478_485
"""Largest image that is decoded, Pillow's own limit: a file of a few kB can stand for gigabytes."""

MAX_FILE_BYTES = 500_000_000
"""Largest image file that is read."""

MAX_DEPTH = 100
"""Most folders within each other."""

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")

logger = logging.getLogger(__name__)

warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # Pillow warns where we refuse


@dataclass(frozen=True)
class File:
    """An image file: posix path relative to the root, size in bytes, time of change in ns."""

    key: str
    num_bytes: int
    changed_ns: int

    @property
    def domain(self) -> str:
        return self.key.split("/", 1)[0]

    @property
    def class_name(self) -> str:
        return self.key.split("/", 2)[1]


@dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """Reads a folder of domains of classes of images, at any depth below the class, suffixes in any case.

    Domains and classes are in alphabetical order; hidden files and folders, and top folders without images,
    do not count. Classes are all class folders of all domains.
    """

    name: str
    root: str | None

    def fingerprint(self) -> str:
        return self.scan().fingerprint

    def scan(self) -> Listing:
        root = self._folder()
        found = _find_images(root, "", set())
        files = [file for file in found if file.key.count("/") >= 2]
        if not files:
            raise DataError(f"data.root: no images in {root}; expected {LAYOUT} ({' '.join(SUFFIXES)})")
        if astray := [file.key for file in found if file.key.count("/") < 2]:
            logger.warning("%d images outside of %s are ignored, e.g. %s", len(astray), LAYOUT, min(astray))
        files.sort(key=lambda file: (file.domain, file.class_name, file.key))
        domains = sorted({file.domain for file in files})
        classes = _class_folders(root, domains)
        label = {name: position for position, name in enumerate(classes)}
        place = {name: position for position, name in enumerate(domains)}
        return Listing(
            name=self.name,
            classes=tuple(classes),
            domains=tuple(domains),
            keys=[file.key for file in files],
            labels=np.array([label[file.class_name] for file in files], dtype=np.int64),
            domain=np.array([place[file.domain] for file in files], dtype=np.int64),
            test=np.zeros(len(files), dtype=np.bool_),
            fingerprint=_fingerprint(files, classes),
        )

    def decode(self, listing: Listing, index: int, size: int) -> NDArray[np.uint8]:
        return read_image(self._folder() / listing.keys[index], size)

    def _folder(self) -> Path:
        if not self.root:
            raise ConfigError(f"data.root: not set; give the folder of {self.name!r}, laid out as {LAYOUT}")
        folder = Path(self.root).expanduser().absolute()
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "does not exist"
            raise DataError(f"data.root: folder {folder} {what}; give the folder laid out as {LAYOUT}")
        return folder


def read_image(path: Path, size: int) -> NDArray[np.uint8]:
    """A file as RGB pixels, shape (size, size, 3).

    Raises:
        BadImageError: It is gone or corrupt; may be skipped.
        DataError: The disk could not be read; never skipped.
    """
    try:
        if path.exists() and not path.is_file():
            raise BadImageError(f"image {path} is not a file; remove it, or set data.on_bad_image=skip")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadImageError(f"image {path} is larger than {MAX_FILE_BYTES // 1_000_000} MB; replace it")
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise BadImageError(f"image {path} is gone, or a link to nothing") from error
    except OSError as error:
        # Not the image's fault, so never skipped: a share that hiccups must not thin out the data.
        raise DataError(f"image {path} cannot be read ({error.strerror}); check disk and rights") from error
    try:
        return decode_image(data, size)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise almost anything on corrupt input
        raise BadImageError(
            f"image {path} is corrupt ({error}); replace it, or set data.on_bad_image=skip"
        ) from error


def decode_image(data: bytes, size: int) -> NDArray[np.uint8]:
    """Decode all of an image, squash it to a square; bicubic with antialiasing, aspect ratio not kept.

    Args:
        data: The content of the file.
        size: Side of the result in pixels.

    Returns:
        RGB, shape (size, size, 3). Alpha is dropped, not blended; the EXIF orientation is not applied.
    """
    with open_bounded(io.BytesIO(data)) as image:
        # A JPEG can be decoded at 1/2, 1/4 or 1/8; staying at twice the target keeps the resampling honest.
        image.draft("RGB", (2 * size, 2 * size))
        image.load()
        plain = image.convert("RGBA") if image.mode == "P" and "transparency" in image.info else image
        rgb = plain.convert("RGB")
    return np.asarray(rgb if rgb.size == (size, size) else rgb.resize((size, size), Image.Resampling.BICUBIC))


def open_bounded(file: Path | io.BytesIO) -> Image.Image:
    """Open an image, of which nothing is decoded yet.

    Raises:
        ValueError: It would have more than MAX_PIXELS pixels.
    """
    image = Image.open(file)
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"{image.width} x {image.height} pixels are more than {MAX_PIXELS}")
    return image


def _find_images(folder: Path, prefix: str, above: set[tuple[int, int]]) -> list[File]:
    """All image files below a folder; `above` holds the folders on the way down, against circles of links."""
    if len(above) > MAX_DEPTH:
        raise DataError(f"data.root: more than {MAX_DEPTH} folders within each other in {prefix[:60]!r}...")
    try:
        stat = folder.stat()
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"data.root: folder {folder} cannot be read ({error.strerror})") from error
    here = (stat.st_dev, stat.st_ino)
    if here in above:
        return []
    found = []
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if _is_folder(entry):
            found += _find_images(folder / entry.name, f"{prefix}{entry.name}/", above | {here})
        elif entry.name.lower().endswith(SUFFIXES):
            found.append(_file(entry, prefix))
    return found


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle
        return False


def _file(entry: os.DirEntry[str], prefix: str) -> File:
    key = prefix + entry.name
    try:
        key.encode()
        stat = entry.stat()
    except UnicodeEncodeError as error:
        raise DataError(f"data.root: the file name {entry.path!r} is not UTF-8; rename it") from error
    except OSError:  # a link to nothing or in a circle: reported when it is decoded
        return File(key, -1, 0)
    return File(key, stat.st_size, stat.st_mtime_ns)


def _class_folders(root: Path, domains: list[str]) -> list[str]:
    names: set[str] = set()
    for domain in domains:
        with os.scandir(root / domain) as entries:
            names |= {entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")}
    return sorted(names)


def _fingerprint(files: list[File], classes: list[str]) -> str:
    text = "\n".join([*classes, *(f"{file.key}\t{file.num_bytes}\t{file.changed_ns}" for file in files)])
    return f"image_folder/1:{hashlib.sha256(text.encode()).hexdigest()}"


READER = ImageFolder
