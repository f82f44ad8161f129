"""Files of arrays: IDX, LIBSVM text, MATLAB, lists of images, and pickles that refuse all but arrays.

Images of large files are read one at a time.
"""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import math
import os
import pickle
import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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


COMPRESSED = 15
MATRIX = 14
TYPES = {1: "<i1", 2: "<u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
MOST_BYTES = 1 << 16
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
                stream: BinaryIO = io.BufferedReader(_Inflated(file, num_bytes), MOST_BYTES)
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
    """Read the data of an element of at most MOST_BYTES bytes."""
    _, num_bytes, small = _tag(stream)
    if num_bytes > MOST_BYTES:
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
                packed = self._file.read(min(self._left, MOST_BYTES))
                self._left -= len(packed)
            try:
                data = self._zlib.decompress(packed, len(buffer))
            except zlib.error as err:
                raise ValueError(err) from err
            if data or not packed:
                buffer[: len(data)] = data
                return len(data)
        return 0


Images = NDArray[np.uint8]
Labels = NDArray[np.int64]

MALFORMED = (
    *(ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, EOFError, ImportError),
    *(struct.error, zlib.error, pickle.UnpicklingError),
)
"""Exceptions that readers of array files raise on malformed files."""


def plain_or_packed(path: Path) -> Path:
    """The path of a file, or of its gzip-compressed form if only that is present."""
    packed = path.with_name(f"{path.name}.gz")
    return packed if packed.exists() and not path.exists() else path


def read_idx(images: Path, labels: Path) -> tuple[StoredImages, Labels]:
    """Read two IDX files: a magic number, the sizes as big-endian int32, then bytes.

    Returns:
        Images, uint8, N of shape (H, W), and labels, int64, shape (N,).

    Raises:
        ValueError: A file is not IDX, or its size differs from that in its header.
    """
    digits = _idx(labels, 1)
    return _idx(images, 3), np.array([int(digits[i]) for i in range(len(digits))], dtype=np.int64)


def _idx(path: Path, rank: int) -> StoredImages:
    file: Any = gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # noqa: SIM115  (read later)
    magic, count, *shape = struct.unpack(f">{rank + 1}i", file.read(4 * (rank + 1)))
    if magic != 0x0800 + rank:
        raise ValueError(f"magic number {magic}, expected {0x0800 + rank}")
    if count < 0 or any(side < 1 for side in shape):
        raise ValueError(f"sizes {[count, *shape]}")
    size = count * math.prod(shape)
    if path.suffix == ".gz":
        images = spool(iter(lambda: file.read(BLOCK), b""), tuple(shape))
        num_bytes = len(images) * math.prod(shape)
    else:
        images = StoredImages(file, 4 * (rank + 1), count, tuple(shape))
        num_bytes = path.stat().st_size - 4 * (rank + 1)
    if num_bytes != size:
        raise ValueError(f"the header says {[count, *shape]} bytes, {num_bytes} are there")
    return images


def read_usps(path: Path) -> tuple[Images, Labels]:
    """Read LIBSVM text: `<label> <index>:<value> ...`, 16 x 16 pixels in -1..1; absent pixels are 0.

    Returns:
        Images, uint8, shape (N, 16, 16), and labels 0..9, int64, shape (N,).

    Raises:
        ValueError: A line has a pixel that does not exist or is not finite.
    """
    rows: list[Images] = []
    labels: list[int] = []
    with bz2.open(path, "rt", encoding="ascii") as lines:
        for line in lines:
            label, *pairs = line.split()
            row = np.zeros(256)
            for place, value in (pair.split(":") for pair in pairs):
                if not 1 <= int(place) <= 256:
                    raise ValueError(f"line {len(rows) + 1} has a pixel {place}, there are 256")
                row[int(place) - 1] = float(value)
            if not np.isfinite(row).all():
                raise ValueError(f"line {len(rows) + 1} has a pixel that is not a finite number")
            rows.append(np.clip((row + 1) / 2 * 255 + 0.5, 0, 255).astype(np.uint8).reshape(16, 16))
            labels.append(int(float(label)) - 1)
    return np.array(rows), np.array(labels, dtype=np.int64)


def read_mat(path: Path) -> tuple[StoredImages, Labels]:
    """Read a MATLAB file with X, shape (32, 32, 3, N), and y; label 10 stands for digit 0.

    Returns:
        Images, uint8, N of shape (32, 32, 3), and labels 0..9, int64, shape (N,).

    Raises:
        ValueError: The file is malformed, or X or y is missing.
    """
    images = None
    labels = None
    for matrix in matrices(path):
        if matrix.name == "X" and len(matrix.shape) == 4 and matrix.dtype == np.uint8:
            height, width, channels, _ = matrix.shape
            reverse = (channels, width, height)  # values are column-major: the first dimension varies fastest
            blocks = (block.reshape(reverse).T for block in matrix.blocks(math.prod(reverse)))
            copies = (np.ascontiguousarray(block) for block in blocks)
            images = spool(copies, (height, width, channels))
        elif matrix.name == "y":
            labels = matrix.values().astype(np.int64) % 10
    if images is None or labels is None:
        raise ValueError("it has no X of bytes with shape (32, 32, 3, N), or no y")
    return images, labels


def read_pickles(*paths: Path) -> tuple[StoredImages, Labels]:
    """Read FedBN's files, each a pickled pair of images (N, H, W[, C]), uint8, and labels (N,).

    Returns:
        Images, uint8, N of shape (H, W) or (H, W, 3), and labels, int64, shape (N,).

    Raises:
        ValueError: A file holds other objects than arrays, or arrays of other types or shapes.
    """
    labels: list[NDArray[Any]] = []
    shapes: list[tuple[int, ...]] = []

    def pieces() -> Iterator[NDArray[Any]]:
        for path in paths:
            images, digits = load_arrays(path)
            images = np.asarray(images)
            images = images[..., 0] if images.ndim == 4 and images.shape[3] == 1 else images
            if images.dtype != np.uint8 or images.ndim < 3 or len(images) != len(digits):
                raise ValueError(f"{path.name}: {images.dtype} {images.shape} with {len(digits)} labels")
            labels.append(np.asarray(digits).reshape(-1).astype(np.int64))
            shapes.append(images.shape[1:])
            yield np.ascontiguousarray(images)

    # Files are read one by one while they are written, so the shape is known only after the first.
    remaining = pieces()
    first = next(remaining)
    stored = spool(itertools.chain([first], remaining), first.shape[1:])
    if len(set(shapes)) > 1:
        raise ValueError(f"images of different sizes: {sorted(set(shapes))}")
    return stored, np.concatenate(labels)


def read_listed(folder: Path, listing: Path) -> tuple[list[Path], Labels]:
    """Read a list of image files with lines `<file> <digit>`.

    Returns:
        Paths of the image files, and labels, int64, shape (N,).

    Raises:
        ValueError: A line is malformed or names a file outside of the folder.
    """
    rows = sorted(
        line.split() for line in listing.read_text(encoding="utf-8-sig").split("\n") if line.strip()
    )
    for file, _ in rows:
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise ValueError(f"it lists {file!r}, which is outside of its folder")
    return [folder / file for file, _ in rows], np.array([int(digit) for _, digit in rows], dtype=np.int64)
