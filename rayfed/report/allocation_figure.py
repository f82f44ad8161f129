"""Figure of the blocks that clients of limited capacity hold and train in each round."""

from __future__ import annotations

from typing import Any

import numpy as np

from rayfed.report import style
from rayfed.report.run_tables import RunTables, span

MOST_ALLOCATION_PANELS = 15
"""Largest number of clients that get a panel each."""
COLOURS = ("#F2F2F2", "#0072B2")
"""A block that a client does not hold, and one that it holds."""


@style.in_style
def allocations(run: RunTables) -> style.Drawing | None:
    """Blocks in each round: a panel with the number of clients that hold them, then a panel a client."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    rows = run.rows("allocations")
    if not rows:
        return None
    blocks = 1 + max(max(row["blocks"], default=0) for row in rows)
    numbers = [row["round"] for row in rows]
    first = min(numbers)
    grids = {
        cid: np.zeros((blocks, max(numbers) - first + 1)) for cid in dict.fromkeys(r["client"] for r in rows)
    }
    for row in rows:
        grids[row["client"]][row["blocks"], row["round"] - first] = 1
    own = grids if len(grids) <= MOST_ALLOCATION_PANELS else {}
    across = min(1 + len(own), 4)
    down = -(-(1 + len(own)) // across)
    figure, axes = style.canvas(down, across, (1.8 + 1.9 * across, 0.7 + 1.7 * down))
    for axis in axes.flat[1 + len(own) :]:
        axis.axis("off")
    extent = (first - 0.5, max(numbers) + 0.5, -0.5, blocks - 0.5)

    def draw(axis: Any, name: str, grid: Any, top: int, colours: Any) -> Any:
        whole = {"aspect": "auto", "origin": "lower", "interpolation": "nearest", "extent": extent}
        picture = axis.imshow(grid, vmin=0, vmax=top, cmap=colours, **whole)
        axis.set_title(name)
        style.rounds_axis(axis, first, max(numbers))
        style.whole_numbers(axis.yaxis)
        axis.set_ylabel("block")
        return picture

    counts = draw(axes.flat[0], "clients that hold a block", sum(grids.values()), len(grids), "viridis")
    bar = figure.colorbar(counts, ax=axes.flat[0])
    style.whole_numbers(bar.ax.yaxis)
    for axis, (name, grid) in zip(axes.flat[1:], own.items(), strict=False):
        draw(axis, name, grid, 1, ListedColormap(COLOURS))
    if own:
        words = ("does not hold", "holds")
        entries = [
            Patch(facecolor=c, edgecolor=style.GREY, label=w) for c, w in zip(COLOURS, words, strict=True)
        ]
        style.legend(figure, entries[::-1], "a client")
    style.heading(figure, *run.title("Blocks of the model that each client holds", span(numbers)))
    return style.Drawing("allocations", figure)
