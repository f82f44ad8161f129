"""An Arrow file of texts as tokens, of different lengths, which every process maps into memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rayfed.data.formats.arrow_file import META
from rayfed.data.text import Inputs, Targets, Tokens

if TYPE_CHECKING:
    import pyarrow as pa

TOKENS = "tokens"
LEARNED = "learned"


def joined(rows: Sequence[Tokens]) -> dict[str, NDArray[Any]]:
    """The tokens of all texts, the position of each first one, and for language models what is learned."""
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    starts[1:] = np.cumsum([len(row.ids) for row in rows])
    nothing: NDArray[Any] = np.empty(0, np.int32)
    found: dict[str, NDArray[Any]] = {
        "starts": starts,
        TOKENS: np.concatenate([nothing, *(row.ids for row in rows)]).astype(np.int32),
    }
    flags = [row.learned for row in rows if row.learned is not None]
    if flags:
        found[LEARNED] = np.concatenate(flags).astype(np.uint8)
    return found


def write(path: Path, text: str, parts: dict[str, NDArray[Any]], columns: dict[str, Any]) -> None:
    """Write a file.

    Args:
        path: The file.
        text: Metadata of the data set.
        parts: What `joined` returned.
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
    }
    arrays = {
        name: pa.LargeListArray.from_arrays(pa.array(parts["starts"]), pa.array(parts[name]))
        for name in (TOKENS, LEARNED)
        if name in parts
    }
    arrays |= {name: pa.array(values, kinds[name]) for name, values in columns.items()}
    schema = pa.schema([pa.field(name, each.type) for name, each in arrays.items()], {META: text})
    batch = pa.RecordBatch.from_arrays(list(arrays.values()), schema=schema)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(batch)


def inputs_of(batch: pa.RecordBatch, size: int) -> tuple[Inputs, Targets | None]:
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
    if LEARNED not in batch.schema.names:
        return inputs, None
    learned = batch.column(LEARNED)
    if not np.array_equal(learned.offsets.to_numpy(), starts):
        raise ValueError("its columns have texts of different lengths")
    return inputs, Targets(inputs, learned.values.to_numpy())
