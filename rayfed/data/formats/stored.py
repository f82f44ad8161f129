"""Images of one shape in a file, read one at a time, so that a source is never in memory as a whole."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 20
"""Bytes read at a time from packed files."""

MAX_BYTES = 4_000_000_000
"""Most that a packed file may unpack to; the largest of the public ones, SVHN's `extra`, has 1.6 GB."""


class StoredImages:
    """uint8 images one after the other in an open file; safe to read from several threads.

    Args:
        file: Open for reading; kept open as long as this lives.
        offset: Where the first image begins.
        count: How many there are.
        shape: Of one image, (H, W) or (H, W, 3).
    """

    def __init__(self, file: BinaryIO, offset: int, count: int, shape: tuple[int, ...]) -> None:
        self._file, self._offset, self._count, self._shape = file, offset, count, shape

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        size = math.prod(self._shape)
        data = os.pread(self._file.fileno(), size, self._offset + index * size)
        return np.frombuffer(data, np.uint8).reshape(self._shape)


def spool(pieces: Iterable[Any], shape: tuple[int, ...]) -> StoredImages:
    """Write images into a file that vanishes when nobody needs it; `TMPDIR` says where.

    Args:
        pieces: The bytes of all images in order, cut anywhere: bytes or contiguous arrays.
        shape: Of one image.

    Raises:
        ValueError: The bytes end within an image, or are more than MAX_BYTES.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the images)
    written = 0
    for piece in pieces:
        written += file.write(memoryview(piece).cast("B"))
        if written > MAX_BYTES:
            raise ValueError(f"it unpacks to more than {MAX_BYTES // 1_000_000} MB")
    file.flush()
    count, rest = divmod(written, math.prod(shape))
    if rest:
        raise ValueError(f"{written} bytes are no whole number of images of {shape}")
    return StoredImages(file, 0, count, shape)
