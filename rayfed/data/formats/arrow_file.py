"""One Arrow IPC file of one record batch, written without ever holding its images in memory.

Arrow puts the lengths of columns before their data, but how many images there are is known only after the
last one (some may be skipped), and writing them twice costs a good part of decoding them. What precedes the
images has the same length whatever their number, so: measure it, stream the images behind a gap of that
length, then write everything around them.
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
"""Key of the text about the data set in the schema."""


def make_schema(width: int, text: str) -> pa.Schema:
    """Columns of a shard: `width` bytes of an image, then label, domain, test (0 or 1) and key."""
    import pyarrow as pa

    fields = {
        "image": pa.binary(width),
        "label": pa.int64(),
        "domain": pa.int64(),
        "test": pa.uint8(),
        "key": pa.string(),
    }
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields.items()], {META: text})


def image_start(schema: pa.Schema) -> int:
    """Where the first image is in every file of this schema; a text of the same length changes nothing."""
    import pyarrow as pa

    image = pa.py_buffer(bytes(schema.field("image").type.byte_width))
    return _write_around(None, image, schema, {"label": [0], "domain": [0], "test": [0], "key": ["x"]})


def finish(path: Path, schema: pa.Schema, columns: Mapping[str, Any]) -> None:
    """Make a whole Arrow file of a gap of `image_start(schema)` bytes followed by the images."""
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
    """The image column as a read-only array of rows of this layout, shape (N,), without a copy."""
    return np.frombuffer(batch.column("image").buffers()[1], dtype=layout)[: batch.num_rows]


def packed(decoded: NDArray[Any] | tuple[NDArray[Any], ...], layout: np.dtype[Any]) -> memoryview:
    """The bytes of a row: an array alone, or one array for each field of the layout."""
    if not isinstance(decoded, tuple):
        return np.ascontiguousarray(decoded).data
    row = np.zeros((), layout)
    for name, value in zip(layout.names or (), decoded, strict=True):
        row[name] = value
    return memoryview(row.tobytes())


class _Around:
    """A sink for Arrow that steps over one buffer, which is in its place already."""

    def __init__(self, file: BinaryIO | None, skip: int) -> None:
        self.file, self.skip = file, skip
        self.position, self.skipped_at, self.closed = 0, -1, False

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
    import pyarrow as pa

    kind = schema.field("image").type
    arrays = [pa.FixedSizeBinaryArray.from_buffers(kind, images.size // kind.byte_width, [None, images])]
    arrays += [pa.array(columns[name], schema.field(name).type) for name in schema.names[1:]]
    sink = _Around(file, images.address)
    with pa.PythonFile(sink, "w") as stream, pa.ipc.new_file(stream, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return sink.skipped_at
