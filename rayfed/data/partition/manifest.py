"""The printed table of a partition, and the file `partition.parquet`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rayfed.arrow_columns import column, column_of_few, table
from rayfed.data.partition.partition import union
from rayfed.data.text import FLAWS, count_flaws, cut_in_words
from rayfed.errors import count_of
from rayfed.objective import CLASSES
from rayfed.terminal.table_formats import fit_width, table_blocks

if TYPE_CHECKING:
    import pyarrow as pa

    from rayfed.data.partition.partition import ClientSplit, Partition
    from rayfed.data.shards import Dataset

MAX_ROWS = 20
"""Number of clients that `describe` shows."""

META = b"rayfed"
"""Key of the digests in the metadata of the parquet file."""


def client_rows(
    clients: Iterable[ClientSplit], labels: NDArray[np.int64], classes: Sequence[str]
) -> list[dict[str, Any]]:
    """Counts of each client, one row by column name.

    Args:
        labels: Class of each sample, shape (N,).
        classes: Class names.

    Returns:
        Rows with `client`, `domain`, the numbers of `train`, `val` and `test` samples, the number of
        `classes` among the training samples, and `top`, the most frequent of these with its share.
    """
    rows = []
    for client in clients:
        counts = np.bincount(labels[client.train], minlength=len(classes))
        most = int(counts.argmax())
        rows.append(
            {
                "client": client.id,
                "domain": client.domain,
                "train": len(client.train),
                "val": len(client.val),
                "test": len(client.test),
                "classes": int((counts > 0).sum()),
                "top": f"{classes[most]} {counts[most] / counts.sum():.0%}",
            }
        )
    return rows


def describe(
    partition: Partition,
    dataset: Dataset,
    width: int | None = None,
    sizes: Mapping[str, Mapping[str, int]] | None = None,
) -> str:
    """The table of a partition as aligned text: up to MAX_ROWS clients, then totals.

    Clients that never train are marked `(unseen)`.

    Args:
        dataset: The data set that it divides.
        width: Letters of a line; columns that do not fit follow below. None: no limit.
        sizes: More columns, such as the blocks that a client holds, by name and client. A column in which all
            shown clients have the same is left out.
    """
    rows = client_rows(partition.clients[:MAX_ROWS], dataset.labels, dataset.classes)
    for name, by_client in (sizes or {}).items():
        held = [by_client.get(row["client"], "-") for row in rows]
        if len({*held}) > 1:
            for row, size in zip(rows, held, strict=True):
                row[name] = size
    for row in rows:
        row["client"] += " (unseen)" if row["client"] in partition.unseen else ""
    cells = [list(rows[0]), *(list(map(str, row.values())) for row in rows)]
    names = (list(rows[0]).index(name) for name in ("client", "domain", "top"))  # the others are numbers
    lines = [line for block in table_blocks(cells, tuple(names), width) for line in block]
    if (more := len(partition.clients) - len(rows)) > 0:
        lines.append(f"... and {more} more clients")
    return "\n".join([*lines, *(fit_width(text, width) for text in _summary(partition, dataset))])


def label_counts(
    clients: Sequence[ClientSplit], labels: NDArray[np.int64], classes: int
) -> NDArray[np.int64]:
    """Number of training samples by client and class, shape (M, C).

    Args:
        clients: M clients.
        labels: Class of each sample, shape (N,).
        classes: Number of classes C.
    """
    return np.array([np.bincount(labels[client.train], minlength=classes) for client in clients])


def label_skew(counts: NDArray[np.int64]) -> float:
    """Mean total variation distance between the class shares of a client and those of all clients.

    Args:
        counts: Number of training samples by client and class, shape (M, C), every client with at least one.

    Returns:
        The mean over clients of half the sum of absolute differences between the class shares of a client and
        those of the samples of all clients together: 0 if all are equal, close to 1 if a client has few of
        many classes.
    """
    shares = counts / counts.sum(axis=1, keepdims=True)
    return float(np.abs(shares - counts.sum(axis=0) / counts.sum()).sum(axis=1).mean() / 2)


def _skew(partition: Partition, dataset: Dataset) -> str:
    counts = label_counts(partition.clients, dataset.labels, len(dataset.classes))
    samples = _range(counts.sum(axis=1))
    present = _range((counts > 0).sum(axis=1))
    return (
        f"{samples} training samples and {present} classes per client; "
        f"label skew {label_skew(counts):.2f} (0: equal class shares, near 1: few of many classes)"
    )


def _range(values: NDArray[np.int64]) -> str:
    """The smallest and the largest value, or the only one."""
    least, most = int(values.min()), int(values.max())
    return f"{least} to {most}" if least < most else str(least)


def _summary(partition: Partition, dataset: Dataset) -> Iterator[str]:
    clients = partition.clients
    tests = partition.domain_tests()
    train, val = (partition.count(split) for split in ("train", "val"))
    what = _shared_in_words(partition, dataset)
    yield (
        f"{dataset.name}: {count_of(len(clients), 'client')} in {count_of(len(tests), 'domain')}, "
        f"{count_of(len(dataset.classes), 'class')}; "
        f"{train} train, {val} val, {sum(map(len, tests.values()))} test{what}"
    )
    yield from filter(None, (numbered_in_words(dataset), dataset.said))
    if partition.drawn is None and dataset.task in CLASSES:
        yield _skew(partition, dataset)
    if partition.drawn is not None:
        samples = len(partition.drawn.used())
        yield f"the samples of a client are drawn with replacement from {samples}, when it takes part"
    if partition.pooled:
        yield "pooled: one client trains on the train and val samples of all"
    if partition.unseen:
        yield never_train(partition)
    if partition.held_out:
        yield "held out: " + ", ".join(f"{name} ({len(own)})" for name, own in partition.held_out.items())
        if dataset.task in CLASSES:
            yield from _untrained(partition, dataset)
    yield from _damages(partition, dataset)


def _shared_in_words(partition: Partition, dataset: Dataset) -> str:
    """Words on test sets that clients share; empty: each client has its own."""
    if not partition.official_test:
        return ""
    released = all(dataset.test[rows].all() for rows in partition.domain_tests().values())
    official = "official, " if released else ""  # else drawn by `data.test`
    return f" ({official}shared by the clients of a domain)"


def numbered_in_words(dataset: Dataset) -> str:
    """The order of the classes, where a user could expect another one; empty: their number is their name.

    It is told of examples of a user, and of labels that are whole numbers but not 0, 1, 2 and so on.
    """
    names = list(dataset.classes)
    if dataset.task not in CLASSES or names == [str(number) for number in range(len(names))]:
        return ""
    if not dataset.own and not all(name.isdecimal() for name in names):
        return ""
    return f"outputs 0 to {len(names) - 1} are the classes {_few(names)}"


def _untrained(partition: Partition, dataset: Dataset) -> Iterator[str]:
    """Sentences on held-out domains with classes that no client has."""
    trained = np.zeros(len(dataset.classes), bool)
    own = (rows for _, split, rows in partition.pieces() if split == "train")
    trained[dataset.labels[union(list(own)) if partition.drawn is None else partition.drawn.used()]] = True
    for name, rows in partition.held_out.items():
        classes = np.unique(dataset.labels[rows])
        if missing := int((~trained[classes]).sum()):
            yield (
                f"warning: no client has samples of {missing} of the {len(classes)} classes of {name}; a "
                f"head for classes cannot learn them, and its accuracy there says nothing about a method"
            )


def _damages(partition: Partition, dataset: Dataset) -> Iterator[str]:
    """Sentences on samples that are not there, or not whole."""
    if dataset.skipped:
        yield f"skipped: {dataset.skipped} images could not be decoded"
    flaws, texts = used_flaws(partition, dataset)
    if flaws["empty"]:
        yield f"warning: {flaws['empty']:,} of {texts:,} texts have an empty answer; only its end is learned"
    if flaws["endless"]:
        yield (
            f"warning: what is learned of {flaws['endless']:,} of {texts:,} texts has no eos_token, so that "
            f"answers do not end; write it behind answers in the tokenizer's chat template"
        )
    if cut := texts_cut(partition, dataset):
        yield f"warning: {cut}" if flaws["answer"] else cut


def used_flaws(partition: Partition, dataset: Dataset) -> tuple[dict[str, int], int]:
    """Number of texts with each flaw among those that the partition uses, and the number of these texts."""
    if dataset.flaws is None:
        return dict.fromkeys(FLAWS, 0), 0
    rows = union([rows for _, _, rows in partition.pieces()])
    return count_flaws(dataset.flaws[rows]), len(rows)


def texts_cut(partition: Partition, dataset: Dataset) -> str:
    """Words on the texts of a partition of which something was cut; empty: all are whole."""
    flaws, texts = used_flaws(partition, dataset)
    return cut_in_words(flaws, texts, dataset.size) if texts else ""


def never_train(partition: Partition) -> str:
    """Words that name the clients that never train; of many, the first MAX_ROWS."""
    return f"never train (data.unseen_clients): {_few(sorted(partition.unseen))}"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_ROWS} more" if len(names) > MAX_ROWS else ""
    return ", ".join(names[:MAX_ROWS]) + more


def to_table(partition: Partition, dataset: Dataset) -> pa.Table:
    """One row for each sample and split, in the order of clients, splits (train, val, test) and samples.

    `client` is empty for samples that belong to no client: official test splits, held-out domains, and the
    samples from which a virtual population draws.
    """
    clients, splits, arrays = zip(*partition.pieces(), strict=True)
    index = np.concatenate(arrays)
    piece = np.repeat(np.arange(len(arrays)), [len(array) for array in arrays])
    rows = column(index, "int64")
    return table(
        {
            "key": dataset.key_column.take(rows),
            "index": rows,
            "label": column(dataset.labels[index], "int64"),
            "domain": column_of_few(dataset.domains, dataset.domain[index]),
            "client": column_of_few(clients, piece),
            "split": column_of_few(splits, piece),
        }
    )


def with_digests(partition: Partition, dataset: Dataset) -> pa.Table:
    """The rows of the manifest with the digests of partition and data."""
    about: dict[str, Any] = {
        "partition": partition.digest,
        "data": dataset.digest,
        "classes": dataset.classes,
    }
    if partition.drawn is not None:
        about["population"] = partition.table.clients_by_domain()
    return to_table(partition, dataset).replace_schema_metadata({META: json.dumps(about)})
