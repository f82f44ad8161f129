"""Arrays in files: images that are read one at a time, and pickles that refuse all but arrays."""

from __future__ import annotations

import math
import os
import pickle
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray


def load_arrays(path: Path) -> Any:
    """The object in a pickle, also in one of Python 2.

    Raises:
        ValueError: It holds other objects, or is no pickle.
    """
    try:
        with path.open("rb") as file:
            return _ArraysOnly(file, encoding="latin1").load()
    except pickle.UnpicklingError as err:
        raise ValueError(str(err)) from err


class _ArraysOnly(pickle.Unpickler):
    """Loads NumPy arrays and refuses all other objects, because a pickle can run any code."""

    ALLOWED = frozenset(
        [("_codecs", "encode"), ("numpy", "ndarray"), ("numpy", "dtype")]
        + [(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")]
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise ValueError(f"it holds {module}.{name}, which is not an array; download it from its authors")
        return super().find_class(module, name)


BLOCK = 1 << 20
"""Number of bytes to read at a time from compressed files."""

MAX_BYTES = 4_000_000_000
"""Limit for the decompressed size of a file; the largest public one, SVHN's `extra`, has 1.6 GB."""


class StoredImages:
    """A sequence of uint8 images in an open file, from which several threads may read.

    Args:
        file: A file open for reading; this object keeps it open.
        offset: Position of the first image in bytes.
        count: Number of images.
        shape: Shape of one image, (H, W) or (H, W, 3).
    """

    def __init__(self, file: BinaryIO, offset: int, count: int, shape: tuple[int, ...]) -> None:
        self._file = file
        self._offset = offset
        self._count = count
        self._shape = shape

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        size = math.prod(self._shape)
        data = os.pread(self._file.fileno(), size, self._offset + index * size)
        return np.frombuffer(data, np.uint8).reshape(self._shape)


def spool(pieces: Iterable[Any], shape: tuple[int, ...]) -> StoredImages:
    """Write images into a temporary file, which is deleted with the result; `TMPDIR` names its folder.

    Args:
        pieces: The bytes of all images in order, as bytes or contiguous arrays of any length.
        shape: Shape of one image.

    Raises:
        ValueError: The bytes end within an image, or are more than MAX_BYTES.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115  (StoredImages keeps it open)
    written = 0
    for piece in pieces:
        written += file.write(memoryview(piece).cast("B"))
        if written > MAX_BYTES:
            raise ValueError(f"its decompressed size is more than {MAX_BYTES // 1_000_000} MB")
    file.flush()
    count, rest = divmod(written, math.prod(shape))
    if rest:
        raise ValueError(f"{written} bytes are not a whole number of images of {shape}")
    return StoredImages(file, 0, count, shape)
