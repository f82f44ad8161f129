"""Images in folders `root/<domain>/<class>/**/<image>`: PACS, OfficeHome, VLCS, DomainNet as released."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rayfed.data.data_config import Resize
from rayfed.data.image_file import read_image
from rayfed.data.listing import SUFFIXES, warn_once
from rayfed.data.source import ONE_DOMAIN, Listing, choose_classes
from rayfed.errors import ConfigError, DataError, count_of

LAYOUT = "<root>/<domain>/<class>/<image>"
ONE_DOMAIN_LAYOUT = "<root>/<class>/<image>"

MAX_DEPTH = 100
"""Limit for the nesting of folders."""

UNUSED = ("thumbs.db", "desktop.ini")
"""Files that systems write into folders, in lower case, which are no images that were left out."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image file: POSIX path relative to the root, size in bytes, modification time in ns."""

    path: str
    num_bytes: int
    changed_ns: int


@dataclass(frozen=True, slots=True)
class Place:
    """Domain and class of an image file, the rest of its key, and whether it is in the test split."""

    domain: str
    class_name: str
    rest: str
    is_test: bool = False

    @property
    def key(self) -> str:
        return f"{self.domain}/{self.class_name}/{self.rest}"


@dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """Reads the images of a folder of domains; they may be at any depth below the folder of their class.

    Domains and classes are in alphabetical order. Hidden files and folders are ignored, and so are domain
    folders without images; suffixes may be in upper case. Where all images are one level higher, in
    `root/<class>/<image>`, they are one domain named `all`. Classes are the class folders of all domains, or
    those of `classes`. `aliases` maps other spellings of folders to the names of domains and classes, e.g.
    `{"Real_World": "Real World"}`; names and keys do not depend on the spelling. `resize` is an argument of
    `decode_image`.
    """

    name: str
    root: str | None
    classes: Sequence[str] | int | None = None
    aliases: Mapping[str, str] | None = None
    resize: Resize = "squash"

    def fingerprint(self) -> str:
        return self.scan().fingerprint

    def scan(self) -> Listing:
        root = self._folder()
        others: list[str] = []
        images = [(file, self._place(file.path)) for file in _find_images(root, "", set(), others)]
        if images and all(file.path.count("/") == 1 for file, _ in images):  # <root>/<class>/<image>
            images = [(file, self._place(f"{ONE_DOMAIN}/{file.path}")) for file, _ in images]
            others = [path for path in others if "/" in path]
        else:
            others = [path for path in others if self._place(path)]
        files = [(file, place) for file, place in images if place]
        if not files:
            raise DataError(_nothing_in(root, bool(images)))
        if astray := [file.path for file, place in images if place is None]:
            warn_once(
                f"data.root: not used: {count_of(len(astray), 'image')} of {root} outside of {LAYOUT}, such "
                f"as {min(astray)}; move what you want to use into the folder of a class"
            )
        if others:
            warn_once(_left_out(others, root))
        domains = sorted({place.domain for _, place in files})
        classes = choose_classes(self.classes, sorted(self._class_names(root, domains)))
        label = {name: position for position, name in enumerate(classes)}
        number = {name: position for position, name in enumerate(domains)}
        files = [(file, place) for file, place in files if place.class_name in label]
        files.sort(key=lambda pair: (pair[1].domain, pair[1].class_name, pair[0].path))
        places = [place for _, place in files]
        if deeper := _deeper(root, places):
            warn_once(deeper)
        keys = [place.key for place in places]
        _check_duplicates(files)
        return Listing(
            name=self.name,
            classes=tuple(classes),
            domains=tuple(domains),
            keys=keys,
            labels=np.array([label[place.class_name] for place in places], dtype=np.int64),
            domain=np.array([number[place.domain] for place in places], dtype=np.int64),
            test=np.array([place.is_test for place in places], dtype=np.bool_),
            fingerprint=_fingerprint([file for file, _ in files], keys, classes),
        )

    def decode(self, listing: Listing, index: int, size: int) -> NDArray[np.uint8]:
        return read_image(self._path(listing.keys[index]), size, self.resize)

    def _place(self, path: str) -> Place | None:
        """Domain, class and key of a file; None if it is not part of the data set."""
        parts = path.split("/", 2)
        if len(parts) < 3:
            return None
        names = [sys.intern(self._name(part)) for part in parts[:2]]  # interned: many files share few names
        return Place(names[0], names[1], parts[2])

    def _path(self, key: str) -> Path:
        """The file of a key, the inverse of `_place`."""
        domain, class_name, rest = key.split("/", 2)
        if domain == ONE_DOMAIN and not (self._root / domain).is_dir():
            return self._inside(self._root, class_name) / rest
        return self._inside(self._root, domain, class_name) / rest if self.aliases else self._root / key

    def _class_names(self, root: Path, domains: Sequence[str]) -> set[str]:
        """Names of all class folders, also of empty ones."""
        top_folders = [root / name for name in subfolders(root) if self._name(name) in domains]
        folders = [root] if list(domains) == [ONE_DOMAIN] and not top_folders else top_folders
        return {self._name(name) for folder in folders for name in subfolders(folder)}

    def _name(self, folder: str) -> str:
        return (self.aliases or {}).get(folder, folder)

    def _inside(self, folder: Path, *names: str) -> Path:
        """The folder of these names, in the spelling in which it exists."""
        for name in names:
            others = [other for other, real in (self.aliases or {}).items() if real == name]
            there = [folder / spelling for spelling in (name, *others) if (folder / spelling).is_dir()]
            folder = there[0] if there else folder / name
        return folder

    @cached_property
    def _root(self) -> Path:
        return self._folder()  # cached, so that the folder is checked once and not for every image

    def _folder(self) -> Path:
        if not self.root:
            raise ConfigError(f"data.root: not set; give the folder of {self.name!r}, laid out as {LAYOUT}")
        folder = Path(self.root).expanduser().absolute()
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "does not exist"
            raise DataError(f"data.root: folder {folder} {what}; give the folder laid out as {LAYOUT}")
        return folder


def _nothing_in(root: Path, loose: bool) -> str:
    """The message for a folder without images, or with images that are in no folder of a class (`loose`)."""
    if loose:
        return (
            f"data.root: the images in {root} are in no folder of a class; expected {LAYOUT} or "
            f"{ONE_DOMAIN_LAYOUT}: set data.root to a folder above, or move them"
        )
    suffixes = " ".join(SUFFIXES)
    return f"data.root: no images in {root}; expected {LAYOUT} or {ONE_DOMAIN_LAYOUT} ({suffixes})"


def _left_out(others: Sequence[str], root: Path) -> str:
    """The warning about files in folders of classes that are no images by their suffix."""
    kinds = sorted({Path(path).suffix.lower() or "no suffix" for path in others})
    return (
        f"data.root: not used: {count_of(len(others), 'file')} of {root} that is no image by its suffix "
        f"({', '.join(kinds)}), such as {min(others)}; convert what you want to use to .png"
    )


def _deeper(root: Path, places: Sequence[Place]) -> str:
    """A warning if all folders of classes hold folders of the same names, which are probably the classes."""
    below: dict[tuple[str, str], set[str]] = {}
    for place in places:
        name, slash, _ = place.rest.partition("/")
        if not slash:
            return ""
        below.setdefault((place.domain, place.class_name), set()).add(name)
    names = next(iter(below.values()), set())
    if len(names) < 2 or len(below) < 2 or any(found != names for found in below.values()):
        return ""
    domain, class_name = min(below)
    return (
        f"data.root: {class_name} and the other folders in {root / domain} are taken for classes, though "
        f"each of them has the folders {', '.join(sorted(names)[:5])}; if those are the classes, set "
        f"data.root={root / domain}"
    )


def _find_images(
    folder: Path, prefix: str, above: set[tuple[int, int]], others: list[str]
) -> list[ImageFile]:
    """All image files below a folder.

    Args:
        prefix: Its path relative to the root, with a slash at the end.
        above: Device and inode of the folders above it, to stop at links that lead back to one of them.
        others: Paths of files that are no images are added to it.
    """
    if len(above) > MAX_DEPTH:
        raise DataError(f"data.root: folders are nested more than {MAX_DEPTH} deep in {prefix[:60]!r}...")
    stat, entries = _entries(folder)
    here = (stat.st_dev, stat.st_ino)
    if here in above:
        return []
    images = []
    for entry in entries:
        if entry.name.startswith(".") or entry.name.lower() in UNUSED:
            continue
        if _is_folder(entry):
            images += _find_images(folder / entry.name, f"{prefix}{entry.name}/", above | {here}, others)
        elif entry.name.lower().endswith(SUFFIXES):
            images.append(_file(entry, prefix))
        else:
            others.append(prefix + entry.name)
    return images


def _entries(folder: Path) -> tuple[os.stat_result, list[os.DirEntry[str]]]:
    """Facts about a folder, and what is in it, by name.

    Raises:
        DataError: It cannot be read.
    """
    try:
        return folder.stat(), sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as err:
        raise DataError(f"data.root: folder {folder} cannot be read ({err.strerror})") from err


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads back to itself
        return False


def _file(entry: os.DirEntry[str], prefix: str) -> ImageFile:
    key = prefix + entry.name
    try:
        key.encode()
        stat = entry.stat()
    except UnicodeEncodeError as err:
        raise DataError(f"data.root: the file name {entry.path!r} is not UTF-8; rename it") from err
    except OSError:  # a broken link: reported when the image is decoded
        return ImageFile(key, -1, 0)
    return ImageFile(key, stat.st_size, stat.st_mtime_ns)


def subfolders(folder: Path) -> list[str]:
    """Names of the folders in a folder, without hidden ones."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]


def _check_duplicates(files: Sequence[tuple[ImageFile, Place]]) -> None:
    """Raise DataError if two files have the same key, because a folder exists in two spellings."""
    seen: dict[str, str] = {}
    for file, place in files:
        if (other := seen.setdefault(place.key, file.path)) != file.path:
            raise DataError(f"data.root: {other!r} and {file.path!r} are the same image; remove one folder")


def _fingerprint(files: Sequence[ImageFile], keys: Sequence[str], classes: Sequence[str]) -> str:
    lines = (f"{key}\t{file.num_bytes}\t{file.changed_ns}" for file, key in zip(files, keys, strict=True))
    try:
        digest = hashlib.sha256("\n".join([*classes, *lines]).encode()).hexdigest()
    except UnicodeEncodeError as err:
        name = next(key for key in [*keys, *classes] if "\\udc" in ascii(key))
        raise DataError(f"data.root: the name of {name!r} is not UTF-8; rename the file or folder") from err
    return f"image_folder/2:{digest}"


READER = ImageFolder
