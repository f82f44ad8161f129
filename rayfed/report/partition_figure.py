"""Figure of a partition: labels of every client, and its number of samples, coloured by domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rayfed.documents import parse_json
from rayfed.report import style
from rayfed.report.run_tables import RunTables, domain_order

if TYPE_CHECKING:
    import pyarrow as pa

MOST_NAMES = 30
"""Largest number of clients or classes that are all named; of more, every tenth, hundredth, ... is."""


def partition_map(run: RunTables) -> style.Drawing | None:
    """Figure of a run's `partition.parquet`; None without that file or without training samples."""
    if run.manifest is None:
        return None
    classes = parse_json((run.manifest.schema.metadata or {}).get(b"rayfed", b"{}")).get("classes", [])
    return draw_partition(run.manifest, [] if run.segmentation else classes, run.name, not run.segmentation)


@style.in_style
def draw_partition(
    table: pa.Table, classes: Sequence[str], name: str, labelled: bool = True
) -> style.Drawing | None:
    """Draw a partition.

    Args:
        table: Columns label, domain, client, split, index, as in `partition.parquet`.
        classes: Names of the labels.
        name: Second line of the title: the run or the data set.
        labelled: Whether each sample has one label. In segmentation it has none, and only the numbers of
            samples are drawn.

    Returns:
        None if no client has training samples.
    """
    label, split = (np.asarray(table[key]) for key in ("label", "split"))
    client, domain = (np.asarray(table[key], dtype=str) for key in ("client", "domain"))
    train = (split == "train") & (client != "")
    if not train.any():
        return None
    names, rows = np.unique(client[train], return_inverse=True)
    owner = dict(zip(client[train].tolist(), domain[train].tolist(), strict=True))
    height = min(max(1.6 + 0.2 * len(names), 3.0), 12)
    figure, axes = style.canvas(1, 1 + labelled, (8.4 if labelled else 6.0, height), sharey=True)
    if labelled:
        counts = np.zeros((len(names), max(len(classes), int(label.max()) + 1)))
        np.add.at(counts, (rows, label[train]), 1)
        _shares(figure, axes[0, 0], counts, classes)
    right = axes[0, -1]
    every = looks_of(table)
    colours = [every[owner[cid]].colour for cid in names]
    right.barh(range(len(names)), np.bincount(rows), color=colours, height=0.8)
    right.set(xlabel="training samples", ylim=(len(names) - 0.5, -0.5))
    style.whole_numbers(right.xaxis)
    shown = style.every(len(names), MOST_NAMES)
    axes[0, 0].set_yticks(shown, [names[i] for i in shown], fontsize=style.FONT - 2)
    style.heading(figure, "Training samples of the clients" + ", by class and number" * labelled, name)
    owners = set(owner.values())
    style.legend(figure, [style.point_of(look, d) for d, look in every.items() if d in owners], "domain")
    return style.Drawing("partition", figure)


def looks_of(table: pa.Table) -> dict[str, style.Look]:
    """The look of every domain of a manifest."""
    return style.looks(domain_order(table))


def _shares(figure: Any, axis: Any, counts: Any, classes: Sequence[str]) -> None:
    """Draw the share of each class in a client's training samples, and what the colours mean.

    Args:
        figure: The figure.
        axis: Its panel for the shares.
        counts: Number of training samples by client and class, shape (M, C).
        classes: Names of the classes; numbers are shown where there are not C names.
    """
    shares = 100 * counts / counts.sum(axis=1, keepdims=True)
    picture = axis.imshow(shares, aspect="auto", vmin=0, vmax=shares.max(), interpolation="nearest")
    axis.set(xlabel="class")
    total = counts.shape[1]
    shown = style.every(total, MOST_NAMES)
    names = [str(classes[i]) if len(classes) == total else str(i) for i in shown]
    turn = 0 if max(map(len, names)) * len(names) <= 36 else 90
    axis.set_xticks(shown, names, rotation=turn, fontsize=style.FONT - 2)
    figure.colorbar(picture, ax=axis, label="share of samples, %", location="right")
