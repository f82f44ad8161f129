"""Read MATLAB 5 files in pieces; scipy would hold a whole decompressed variable in memory.

Format: The MathWorks, "MAT-File Format", level 5. A file is a header of 128 bytes, then elements, each with a
tag (type, number of bytes); a compressed element contains another element. A matrix consists of four
elements: flags, dimensions, name, and values in column-major order.
"""

from __future__ import annotations

import io
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

COMPRESSED = 15
MATRIX = 14
TYPES = {1: "<i1", 2: "<u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
BLOCK = 1 << 16
"""Number of bytes to read at a time, and limit for small elements."""


@dataclass(frozen=True)
class Matrix:
    """A variable of a file, whose values are read when they are needed.

    Attributes:
        name: Name of the variable.
        shape: Its dimensions; values are in column-major order.
        dtype: Type of the values in the file.
        stream: File at the position of the values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    stream: BinaryIO

    def values(self) -> NDArray[np.generic]:
        """All values in the order of the file, shape (number of values,)."""
        return np.frombuffer(_exactly(self.stream, math.prod(self.shape) * self.dtype.itemsize), self.dtype)

    def blocks(self, size: int) -> Iterator[NDArray[np.generic]]:
        """The values in the order of the file, in arrays of shape (size,)."""
        for _ in range(math.prod(self.shape) // size):
            yield np.frombuffer(_exactly(self.stream, size * self.dtype.itemsize), self.dtype)


def matrices(path: Path) -> Iterator[Matrix]:
    """The numeric variables of a file. Read the values of a variable before taking the next one.

    Raises:
        ValueError: The file is not a MATLAB 5 file, or ends early.
    """
    with path.open("rb") as file:
        if _exactly(file, 128)[124:] != b"\x00\x01IM":
            raise ValueError("not a MATLAB 5 file")
        end = path.stat().st_size
        while file.tell() < end:
            kind, num_bytes = struct.unpack("<2I", _exactly(file, 8))
            start = file.tell()
            if kind == COMPRESSED:
                stream: BinaryIO = io.BufferedReader(_Inflated(file, num_bytes), BLOCK)
                kind, _ = struct.unpack("<2I", _exactly(stream, 8))
            else:
                stream = file
            if kind == MATRIX and (matrix := _matrix(stream)):
                yield matrix
            file.seek(start + num_bytes)


def _matrix(stream: BinaryIO) -> Matrix | None:
    """Read all of a matrix except its values; None if it is not numeric."""
    _element(stream)  # flags
    shape = tuple(int(n) for n in np.frombuffer(_element(stream), "<i4"))
    name = _element(stream).decode("ascii")
    kind, num_bytes, small = _tag(stream)
    if kind not in TYPES or not shape or min(shape) < 0:
        return None
    dtype = np.dtype(TYPES[kind])
    if math.prod(shape) * dtype.itemsize != num_bytes:
        raise ValueError(f"{name}: {num_bytes} bytes for a matrix of {shape}")
    return Matrix(name, shape, dtype, io.BytesIO(small) if small else stream)


def _element(stream: BinaryIO) -> bytes:
    """Read the data of an element of at most BLOCK bytes."""
    _, num_bytes, small = _tag(stream)
    if num_bytes > BLOCK:
        raise ValueError(f"{num_bytes} bytes where a name or dimensions are expected")
    return small or _exactly(stream, -(-num_bytes // 8) * 8)[:num_bytes]


def _tag(stream: BinaryIO) -> tuple[int, int, bytes]:
    """Type and number of bytes of an element, and its data if they are in the tag (up to four bytes)."""
    head = _exactly(stream, 8)
    (word,) = struct.unpack_from("<I", head)
    if size := word >> 16:
        return word & 0xFFFF, size, head[4 : 4 + size]
    return word, struct.unpack_from("<I", head, 4)[0], b""


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise ValueError("the file ends early")
    return data


class _Inflated(io.RawIOBase):
    """Decompresses the next `num_bytes` of a file while it is read."""

    def __init__(self, file: BinaryIO, num_bytes: int) -> None:
        self._file = file
        self._left = num_bytes
        self._zlib = zlib.decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._zlib.eof:
            packed = self._zlib.unconsumed_tail
            if not packed:
                packed = self._file.read(min(self._left, BLOCK))
                self._left -= len(packed)
            try:
                data = self._zlib.decompress(packed, len(buffer))
            except zlib.error as err:
                raise ValueError(err) from err
            if data or not packed:
                buffer[: len(data)] = data
                return len(data)
        return 0
