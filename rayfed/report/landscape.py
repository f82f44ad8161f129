"""Draws the loss around the models of a finished run, which `rayfed.analysis.landscape` computes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rayfed.analysis.landscape import Vectors, survey
from rayfed.analysis.reopen import mention
from rayfed.documents import user_folder
from rayfed.errors import ConfigError
from rayfed.record.readers import read_table
from rayfed.report.group_figures import save_figure
from rayfed.terminal.console import say
from rayfed.terminal.guard import guarded, parser_of

USAGE = """\
python -m rayfed.report.landscape RUN [--points 11] [--images 100] [--debug]

Draws the loss around the global model and the clients' models of a finished run, for example
  python -m rayfed.report.landscape runs/mine --points 21
"""
TITLE = "loss around the global model and the clients' models"


def landscape(folder: Path) -> Path | None:
    """Draw the table `landscape` of a run; None where there is none."""
    rows = read_table(folder, "landscape")
    if not rows:
        return None
    from matplotlib import pyplot as plt

    xs, ys, z = surface(rows)
    figure, axis = plt.subplots(figsize=(6, 5))
    figure.colorbar(axis.contourf(xs, ys, z, levels=20, cmap="viridis"), ax=axis, label="loss")
    for row in rows:
        if row["kind"] == "client":
            axis.plot(row["x"], row["y"], "o", color="white", markeredgecolor="black")
            axis.annotate(row["client"], (row["x"], row["y"]), color="white", fontsize=8)
    axis.plot(0, 0, "*", color="red", markersize=14, label="global model")
    share = f"{100 * rows[0]['share']:.0f} % of the clients' squared distances lie in this plane"
    axis.set(xlabel="distance", ylabel="distance", title=share)
    axis.legend(loc="upper right", fontsize=8)
    return save_figure(figure, folder, "landscape")


def surface(rows: Sequence[Mapping[str, Any]]) -> tuple[Vectors, Vectors, Vectors]:
    """The grid in the table `landscape`: x of shape (X,), y of shape (Y,), loss of shape (Y, X)."""
    loss = {(row["x"], row["y"]): row["loss"] for row in rows if row["kind"] == "grid"}
    xs, ys = (sorted({place[k] for place in loss}) for k in (0, 1))
    return np.array(xs), np.array(ys), np.array([[loss[x, y] for x in xs] for y in ys])


def main(argv: Sequence[str] | None = None) -> int:
    """Draw from the command line. Exit code: 0 drawn, 1 failed, 2 bad input, 130 interrupted."""
    parser = parser_of("rayfed.report.landscape", USAGE)
    parser.add_argument("run", type=user_folder, help="folder of a finished run")
    parser.add_argument("--points", type=int, default=11, help="points of the grid in each direction")
    parser.add_argument("--images", type=int, default=100, help="largest number of images of each test set")
    args = parser.parse_args(argv)

    def work() -> None:
        import matplotlib as mpl

        mpl.use("Agg")
        if args.points < 2 or args.images < 1:
            raise ConfigError("--points: at least 2, --images: at least 1")
        survey(args.run, args.points, args.images)
        if picture := landscape(args.run):
            mention(args.run, TITLE, picture)
            say(str(picture))

    return guarded(work, args.debug, "the run itself is unchanged")


if __name__ == "__main__":
    sys.exit(main())
