"""Who has what, as a picture: the labels of every client, and its number of samples, coloured by domain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rayfed.report.files import write_whole

if TYPE_CHECKING:
    import pyarrow as pa

MOST_NAMES = 30
"""More clients or classes than this are not named one by one."""


def partition_map(folder: Path) -> Path | None:
    """The picture of a run's `partition.parquet`; None where there is none, or nobody trains."""
    import pyarrow.parquet as pq

    source, path = folder / "partition.parquet", folder / "figures" / "partition.png"
    if not source.exists():
        return None
    table = pq.read_table(source, columns=["label", "domain", "client", "split"])
    classes = json.loads((table.schema.metadata or {}).get(b"rayfed", b"{}")).get("classes", [])
    path.parent.mkdir(exist_ok=True)
    return path if draw(table, classes, path) else None


def draw(table: pa.Table, classes: Sequence[str], path: Path) -> bool:
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
    figure = Figure(figsize=(9, min(2 + 0.22 * len(names), 12)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    picture = left.imshow(
        counts / sizes[:, None], aspect="auto", cmap="viridis", vmin=0, interpolation="nearest"
    )
    figure.colorbar(picture, ax=left, label="share of the client's samples")
    left.set(xlabel="class", ylabel="client", title="labels")
    if counts.shape[1] <= MOST_NAMES and len(classes) == counts.shape[1]:
        left.set_xticks(range(len(classes)), classes, rotation=90, fontsize=7)
    if len(names) <= MOST_NAMES:
        left.set_yticks(range(len(names)), names, fontsize=7)
    for name, position in place.items():
        mine = [i for i, client_name in enumerate(names) if owner[client_name] == name]
        right.barh(mine, sizes[mine], color=palette(position % 10), label=name)
    right.set(xlabel="training samples", title="domains")
    figure.legend(loc="outside upper right", ncols=8, fontsize=7)
    write_whole(path, lambda p: figure.savefig(p, dpi=100, format="png"))
    return True
