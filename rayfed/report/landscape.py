"""Draws the loss around the models of a finished run, which `rayfed.analysis.landscape` computes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rayfed.analysis.landscape import Vectors, survey
from rayfed.documents import user_folder
from rayfed.errors import ConfigError
from rayfed.report import style
from rayfed.report.document import add_figure
from rayfed.report.run_tables import RunTables
from rayfed.terminal.console import say
from rayfed.terminal.guard import guarded, parser_of
from rayfed.terminal.stages import screen_of, shown_on

USAGE = """\
python -m rayfed.report.landscape RUN [--points 11] [--images 100]
    [--debug]

Draws the loss around the global model and the clients' models of a finished
run, for example
  python -m rayfed.report.landscape runs/mine --points 21
"""
MOST_NAMES = 15
"""Largest number of clients whose names are shown."""
TITLE = "loss around the global model and the clients' models"


@style.in_style
def landscape(run: RunTables) -> style.Drawing | None:
    """Draw the table `landscape` of a run; None where there is none."""
    rows = run.rows("landscape")
    if not rows:
        return None
    figure, axes = style.canvas(1, 1, (6.8, 4.8))
    axis = axes[0, 0]
    xs, ys, z = surface(rows)
    figure.colorbar(axis.contourf(xs, ys, z, levels=20, cmap="viridis"), ax=axis, label="loss")
    clients = [row for row in rows if row["kind"] == "client"]
    for row in clients:
        look = run.look(run.owners.get(row["client"], ""))
        place = {"marker": look.marker, "markersize": 7, "markeredgecolor": "white", "linestyle": ""}
        axis.plot(row["x"], row["y"], color=look.colour, **place)
    (centre,) = axis.plot(
        0, 0, "*", color="white", markeredgecolor="black", markersize=13, label="global model"
    )
    axis.set(xlabel="distance between models, first direction", ylabel="second direction")
    last = max((row["round"] for row in run.rounds), default=0)
    share = f"{100 * rows[0]['share']:.0f} % of the clients' squared distances from it lie in this plane"
    style.heading(figure, *run.title(f"{_whose_loss(run)} around the global model", f"round {last}"), share)
    known = {run.owners.get(row["client"]) for row in clients}
    own = [style.line_of(look, f"client of {d}") for d, look in run.domains.items() if d in known]
    for entry in own:
        entry.set_linestyle("")
    style.legend(figure, [centre, *own])
    if len(clients) <= MOST_NAMES:
        places = [(row["x"], row["y"]) for row in clients]
        style.place_labels(axis, [*places, (0.0, 0.0)], [row["client"] for row in clients])
    return style.Drawing("landscape", figure)


def _whose_loss(run: RunTables) -> str:
    """The measured loss and its data, in words, as `rayfed.analysis.landscape` measures it."""
    if run.held_out:
        return f"Loss on the unseen domain {', '.join(run.held_out)}"
    return "Loss on the clients' test sets (mean over clients)"


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
        if args.points < 2 or args.images < 1:
            raise ConfigError("--points: at least 2, --images: at least 1")
        with shown_on(screen_of()):
            survey(args.run, args.points, args.images)
        if drawing := landscape(RunTables(args.run)):
            say(str(add_figure(args.run, TITLE, drawing)))

    return guarded(work, args.debug, "the run itself is unchanged")


if __name__ == "__main__":
    sys.exit(main())
