"""Write an Arrow IPC file of one record batch without holding its images in memory.

Arrow stores the lengths of columns before their data, but the number of images is known only after the last
one, because some may be skipped, and writing images twice would take a good part of the time of decoding
them. The bytes before the images have the same length for any number of images. So this length is measured
first, the images are written after a gap of this length, and the rest of the file is written around them at
the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa

META = b"rayfed"
"""Key of the metadata of the data set in the schema."""


def make_schema(width: int, text: str, owned: bool = False, split: bool = False) -> pa.Schema:
    """The columns image (`width` bytes), label, domain, test, key, and owner and split if there are any.

    Args:
        width: Bytes of one row of the image column.
        text: Metadata of the data set.
        owned: Whether the data set names the client of each sample.
        split: Whether it gives the split of each sample.
    """
    import pyarrow as pa

    fields = {
        "image": pa.binary(width),
        "label": pa.int64(),
        "domain": pa.int64(),
        "test": pa.uint8(),
        "key": pa.string(),
        **({"owner": pa.string()} if owned else {}),
        **({"split": pa.uint8()} if split else {}),
    }
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields.items()], {META: text})


def image_start(schema: pa.Schema) -> int:
    """Position of the first image in a file in bytes; equal for metadata texts of equal length."""
    import pyarrow as pa

    image = pa.py_buffer(bytes(schema.field("image").type.byte_width))
    row = {"label": [0], "domain": [0], "test": [0], "key": ["x"], "owner": ["x"], "split": [0]}
    return _write_around(None, image, schema, row)


def finish(path: Path, schema: pa.Schema, columns: Mapping[str, Any]) -> None:
    """Complete a file that consists of a gap of `image_start(schema)` bytes and the images.

    Args:
        path: The file, which is changed in place.
        schema: The result of `make_schema`.
        columns: Values of the other columns by name.

    Raises:
        RuntimeError: Arrow puts the images at another position.
    """
    import pyarrow as pa

    start = image_start(schema)
    with pa.memory_map(str(path)) as mapped:
        mapped.seek(start)
        images = mapped.read_buffer(len(columns["label"]) * schema.field("image").type.byte_width)
        with path.open("r+b") as file:
            wrote = _write_around(file, images, schema, columns)
    if wrote != start:
        raise RuntimeError(f"images of {path} are at byte {start}, but Arrow expects them at {wrote}")


def rows_of(batch: pa.RecordBatch, layout: np.dtype[Any]) -> NDArray[Any]:
    """The image column as a read-only array of shape (N,), without a copy.

    Args:
        batch: The record batch of a file.
        layout: Structured type of a row.
    """
    return np.frombuffer(batch.column("image").buffers()[1], dtype=layout)[: batch.num_rows]


def packed(decoded: NDArray[Any] | tuple[NDArray[Any], ...], layout: np.dtype[Any]) -> memoryview:
    """The bytes of a row.

    Args:
        decoded: One array, or an array for each field of the layout.
        layout: Structured type of a row.
    """
    if not isinstance(decoded, tuple):
        return np.ascontiguousarray(decoded).data
    row = np.zeros((), layout)
    for name, value in zip(layout.names or (), decoded, strict=True):
        row[name] = value
    return memoryview(row.tobytes())


class _SkippingFile:
    """A file for Arrow to write to, which skips the buffer of the images, as these are in place already.

    Args:
        file: The file; None only measures positions.
        skip: Memory address of the buffer of the images.
    """

    def __init__(self, file: BinaryIO | None, skip: int) -> None:
        self.file = file
        self.skip = skip
        self.position = 0
        self.skipped_at = -1
        self.closed = False

    def write(self, data: Any) -> int:
        if getattr(data, "address", None) == self.skip:
            self.skipped_at = self.position
            if self.file:
                self.file.seek(len(data), 1)
        elif self.file:
            self.file.write(data)
        self.position += len(data)
        return len(data)

    def flush(self) -> None:
        if self.file:
            self.file.flush()

    def close(self) -> None:
        self.closed = True


def _write_around(
    file: BinaryIO | None, images: pa.Buffer, schema: pa.Schema, columns: Mapping[str, Any]
) -> int:
    """Write all of the file except the images; returns the position of the images in bytes."""
    import pyarrow as pa

    kind = schema.field("image").type
    arrays = [pa.FixedSizeBinaryArray.from_buffers(kind, images.size // kind.byte_width, [None, images])]
    arrays += [pa.array(columns[name], schema.field(name).type) for name in schema.names[1:]]
    sink = _SkippingFile(file, images.address)
    with pa.PythonFile(sink, "w") as stream, pa.ipc.new_file(stream, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return sink.skipped_at
