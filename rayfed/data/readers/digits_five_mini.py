"""The embedded data set digits-five-mini, see `rayfed.data.glyphs`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata, resources
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rayfed.data.source import Listing

if TYPE_CHECKING:
    from rayfed.data.glyphs import Embedded

MAKERS = ("matplotlib", "numpy", "pillow", "scikit-learn", "torch")
"""Packages whose fonts, samples or arithmetic determine the pixels."""


@cache
def _versions() -> list[tuple[str, str]]:
    return [(package, metadata.version(package)) for package in MAKERS]


@dataclass(frozen=True, kw_only=True)
class DigitsFiveMini:
    """Five domains of digits, 32 x 32 pixels, with an official test split."""

    name: str

    def fingerprint(self) -> str:
        """A hash of the code and the package versions that make the images, without making them."""
        out = hashlib.sha256()
        for package, version in _versions():
            out.update(f"{package}={version}\n".encode())
        out.update((resources.files("rayfed.data") / "glyphs.py").read_bytes())
        return f"digits_five_mini/1:{out.hexdigest()}"

    def scan(self) -> Listing:
        data = self._data
        return Listing(
            name=self.name,
            classes=tuple(data.classes),
            domains=tuple(data.domains),
            keys=list(data.keys),
            labels=data.labels.astype(np.int64),
            domain=data.domain.astype(np.int64),
            test=data.test.astype(np.bool_),
            fingerprint=self.fingerprint(),
        )

    def decode(self, listing: Listing, index: int, size: int) -> NDArray[np.uint8]:
        image = self._data.images[index]
        if image.shape[0] == size:
            return image
        return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR))

    @cached_property
    def _data(self) -> Embedded:
        from rayfed.data import glyphs

        return glyphs.build()


READER = DigitsFiveMini
