"""Small image folders and a reader that counts, for the tests of this folder."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rayfed.data.readers.image_folder import ImageFolder

PACS = Path(os.environ.get("RAYFED_SHARED", "../shared")) / "data" / "PACS"

SIZE = 16
"""Side of the prepared images, in pixels."""

needs_pacs = pytest.mark.skipif(not PACS.is_dir(), reason="no data/PACS in RAYFED_SHARED")


def make_folder(root: Path, domains=("photo", "sketch"), classes=("cat", "dog"), count=3, side=20) -> Path:
    """Random images; photo gets .jpg, the others .png."""
    rng = np.random.default_rng(0)
    for domain in domains:
        for name in classes:
            folder = root / domain / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
                suffix = "jpg" if domain == "photo" else "png"
                Image.fromarray(pixels).save(folder / f"{number}.{suffix}")
    return root


@dataclass(frozen=True, kw_only=True)
class CountingFolder(ImageFolder):
    """Notes every decoded key in a file, and takes its time."""

    log: str
    seconds: float = 0.0

    def decode(self, listing, index, size):
        with Path(self.log).open("a") as file:
            file.write(listing.keys[index] + "\n")
        time.sleep(self.seconds)
        return super().decode(listing, index, size)


@dataclass(frozen=True, kw_only=True)
class BlindFolder(ImageFolder):
    """Lists images but must never be asked to decode one."""

    def decode(self, listing, index, size):
        raise AssertionError(f"decoded {listing.keys[index]}")


def folder(root, kind=ImageFolder, **options):
    return kind(name="toy", root=str(root), **options)


def assert_right(dataset, root):
    """Every image, label and domain is that of its key."""
    source = folder(root)
    listing = source.scan()
    at = {key: index for index, key in enumerate(listing.keys)}
    for row, key in enumerate(dataset.keys):
        assert np.array_equal(dataset.images[row], source.decode(listing, at[key], dataset.size))
        domain, name, _ = key.split("/", 2)
        assert dataset.domains[dataset.domain[row]] == domain
        assert dataset.classes[dataset.labels[row]] == name
