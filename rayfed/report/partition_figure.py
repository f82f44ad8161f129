"""Figure of a partition: labels of every client, and its number of samples, coloured by domain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rayfed.documents import parse_json
from rayfed.record.files import write_whole

if TYPE_CHECKING:
    import pyarrow as pa

MOST_NAMES = 30
"""Largest number of clients or classes whose names are shown."""


def partition_map(folder: Path) -> Path | None:
    """Figure of a run's `partition.parquet`; None without that file or without training samples."""
    import pyarrow.parquet as pq

    source = folder / "partition.parquet"
    path = folder / "figures" / "partition.png"
    if not source.exists():
        return None
    table = pq.read_table(source, columns=["label", "domain", "client", "split"])
    classes = parse_json((table.schema.metadata or {}).get(b"rayfed", b"{}")).get("classes", [])
    return path if draw_partition(table, classes, path) else None


def draw_partition(table: pa.Table, classes: Sequence[str], path: Path) -> bool:
    """Draw a partition.

    Args:
        table: Columns label, domain, client, split, as in `partition.parquet`.
        classes: Names of the labels.
        path: A PNG file.

    Returns:
        False if no client has training samples; then nothing is drawn.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    label, split = (np.asarray(table[name]) for name in ("label", "split"))
    client, domain = (np.asarray(table[name], dtype=str) for name in ("client", "domain"))
    train = (split == "train") & (client != "")
    if not train.any():
        return False
    names, rows = np.unique(client[train], return_inverse=True)
    counts = np.zeros((len(names), max(len(classes), int(label.max()) + 1)))
    np.add.at(counts, (rows, label[train]), 1)
    sizes = counts.sum(axis=1)
    owner = dict(zip(client[train].tolist(), domain[train].tolist(), strict=True))
    palette = mpl.colormaps["tab10"]
    place = {name: position for position, name in enumerate(dict.fromkeys(owner[name] for name in names))}
    # Margins are fixed because constrained layout is slow, and every run draws this figure.
    height = min(2 + 0.22 * len(names), 12)
    figure = Figure(figsize=(9, height))
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    figure.subplots_adjust(left=0.17, right=0.98, wspace=0.05, top=1 - 0.45 / height, bottom=0.9 / height)
    left.imshow(counts / sizes[:, None], aspect="auto", vmin=0, vmax=1, interpolation="nearest")
    left.set(xlabel="class", title="share of each class, 0 to 1")
    left.set_yticks([])
    if counts.shape[1] <= MOST_NAMES and len(classes) == counts.shape[1]:
        left.set_xticks(range(len(classes)), classes, rotation=30 if len(classes) <= 10 else 90, fontsize=7)
    if len(names) <= MOST_NAMES:
        left.set_yticks(range(len(names)), names, fontsize=7)
    colours = [palette(place[owner[name]] % 10) for name in names]
    right.barh(range(len(names)), sizes, color=colours, label=[owner[name] for name in names])
    right.set(xlabel="training samples", title="domains")
    ends = {owner[name]: (palette(place[owner[name]] % 10), i) for i, name in enumerate(names)}
    for name, (colour, i) in ends.items():
        right.text(0.99, i, name, color=colour, transform=right.get_yaxis_transform(), ha="right", fontsize=7)
    write_whole(path, lambda p: figure.savefig(p, dpi=100, format="png"))
    return True
