"""Writes Arrow IPC files of images or tokens, which every process maps into memory.

Images are not held in memory together. Arrow stores the lengths of columns before their data, but the number
of images is known only after the last one, because some may be skipped, and writing images twice would take a
good part of the time of decoding them. The bytes before the images have the same length for any number of
images. So this length is measured first, the images are written after a gap of this length, and the rest of
the file is written around them at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from rayfed.arrow_columns import column
from rayfed.data.text import Inputs, Targets, Tokens

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


def pack_row(decoded: NDArray[Any] | tuple[NDArray[Any], ...], layout: np.dtype[Any]) -> memoryview:
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
    arrays += [column(columns[name], str(schema.field(name).type)) for name in schema.names[1:]]
    sink = _SkippingFile(file, images.address)
    with pa.PythonFile(sink, "w") as stream, pa.ipc.new_file(stream, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return sink.skipped_at


TOKENS = "tokens"
LEARNED = "learned"
SCORE = "score"


def join_texts(rows: Sequence[Tokens]) -> dict[str, NDArray[Any]]:
    """The tokens of all texts, the position of each first one, and what is learned, or the targets if any."""
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    starts[1:] = np.cumsum([len(row.ids) for row in rows])
    nothing: NDArray[Any] = np.empty(0, np.int32)
    arrays: dict[str, NDArray[Any]] = {
        "starts": starts,
        TOKENS: np.concatenate([nothing, *(row.ids for row in rows)]).astype(np.int32),
    }
    flags = [row.learned for row in rows if row.learned is not None]
    if flags:
        arrays[LEARNED] = np.concatenate(flags).astype(np.uint8)
    scores = [row.score for row in rows if row.score is not None]
    if scores:
        arrays[SCORE] = np.array(scores, dtype=np.float32)
    return arrays


def write(path: Path, text: str, parts: dict[str, NDArray[Any]], columns: dict[str, Any]) -> None:
    """Write a file.

    Args:
        text: Metadata of the data set.
        parts: Result of `join_texts`.
        columns: Values of the other columns by name.
    """
    import pyarrow as pa

    kinds = {
        "label": pa.int64(),
        "domain": pa.int64(),
        "test": pa.uint8(),
        "key": pa.string(),
        "owner": pa.string(),
        "split": pa.uint8(),
        "flaws": pa.uint8(),
    }
    arrays = {
        name: pa.LargeListArray.from_arrays(pa.array(parts["starts"]), pa.array(parts[name]))
        for name in (TOKENS, LEARNED)
        if name in parts
    }
    arrays |= {name: pa.array(parts[name]) for name in (SCORE,) if name in parts}
    arrays |= {name: pa.array(values, kinds[name]) for name, values in columns.items()}
    schema = pa.schema([pa.field(name, each.type) for name, each in arrays.items()], {META: text})
    batch = pa.RecordBatch.from_arrays(list(arrays.values()), schema=schema)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(batch)


def inputs_of(batch: pa.RecordBatch, size: int) -> tuple[Inputs, Targets | NDArray[np.float32] | None]:
    """The texts of a record batch, and the targets where it has some, without copies.

    Args:
        batch: The record batch of a file.
        size: Tokens that the model takes.

    Raises:
        ValueError: A text has no token, or more than the model takes.
    """
    column = batch.column(TOKENS)
    starts = column.offsets.to_numpy()
    inputs = Inputs(column.values.to_numpy(), starts, size)
    lengths = inputs.lengths
    if lengths.min() < 0 or lengths.max() > size:
        raise ValueError(f"a text has more than {size} tokens")
    if SCORE in batch.schema.names:
        return inputs, batch.column(SCORE).to_numpy()
    if LEARNED not in batch.schema.names:
        return inputs, None
    learned = batch.column(LEARNED)
    if not np.array_equal(learned.offsets.to_numpy(), starts):
        raise ValueError("its columns have texts of different lengths")
    return inputs, Targets(inputs, learned.values.to_numpy())
