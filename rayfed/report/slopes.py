"""Draws how gaps follow weights in a finished run, which `rayfed.analysis.slopes` computes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rayfed.analysis.slopes import TABLE, survey
from rayfed.documents import user_folder
from rayfed.errors import ConfigError
from rayfed.report import style
from rayfed.report.document import add_figure
from rayfed.report.run_tables import RunTables
from rayfed.terminal.console import say
from rayfed.terminal.guard import guarded, parser_of
from rayfed.terminal.stages import screen_of, shown_on

USAGE = """\
python -m rayfed.report.slopes RUN [--points 21] [--debug]

Draws the generalization gap of each client over its weight in the mean model,
for example
  python -m rayfed.report.slopes runs/mine
"""
TITLE = "generalization gap of each client over its weight"
MOST_CLIENTS = 12
"""Largest number of clients that are drawn."""


@style.in_style
def gap_slopes(run: RunTables) -> style.Drawing | None:
    """Draw the table `slopes` of a run: points and line of each client; None where there is none."""
    rows = run.rows(TABLE)
    if not rows:
        return None
    clients = by_client(rows)
    shown = list(clients)[:MOST_CLIENTS]
    figure, axes = style.canvas(1, 1, (7.4, 4.2))
    axis = axes[0, 0]
    entries = []
    for place, name in enumerate(shown):
        own = clients[name]
        look = run.look(run.owners.get(name, ""))
        x, y = (np.array([row[key] for row in own]) for key in ("change", "gap_change"))
        slope, rho = own[0]["slope"], own[0]["rho"]
        kind = style.LINES[place % len(style.LINES)]
        axis.plot(x, y, look.marker, color=look.colour, markersize=3.5, alpha=0.7)
        axis.plot(x, y.mean() + slope * (x - x.mean()), kind, color=look.colour)
        label = f"{name}: dG/da {slope:.2f}, K {steepness(slope)}, rho {rho:.2f}"
        entries.append(style.line_of(look, label))
        entries[-1].set_linestyle(kind)
    axis.axhline(0, color="black", linewidth=0.6)
    axis.axvline(0, color="black", linewidth=0.6)
    axis.set(xlabel="change of the client's weight", ylabel="change of its generalization gap")
    more = f"the first {len(shown)} of {len(clients)} clients; " if len(shown) < len(clients) else ""
    last = max((row["round"] for row in run.rounds), default=0)
    what, about = run.title("Generalization gap of each client over its weight", f"round {last}")
    style.heading(figure, what, about, f"{more}K = -da/dG")
    style.legend(figure, entries, "client")
    return style.Drawing("slopes", figure)


def by_client(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Rows of the table `slopes` by client, in order."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["client"], []).append(row)
    return found


def steepness(slope: float) -> str:
    """FFT-GP's K, Eq. 11: decrease of the gap per weight, inverted; of a line with this slope dG/da.

    >>> steepness(-0.5), steepness(0.0)
    ('2.00', 'infinite')
    """
    return f"{-1 / slope:.2f}" if slope else "infinite"


def main(argv: Sequence[str] | None = None) -> int:
    """Draw from the command line. Exit code: 0 drawn, 1 failed, 2 bad input, 130 interrupted."""
    parser = parser_of("rayfed.report.slopes", USAGE)
    parser.add_argument("run", type=user_folder, help="folder of a finished run")
    parser.add_argument("--points", type=int, default=21, help="number of weights of each client, odd")
    args = parser.parse_args(argv)

    def work() -> None:
        if args.points < 3 or args.points % 2 == 0:
            raise ConfigError(f"--points: {args.points} is not an odd number of at least 3")
        with shown_on(screen_of()):
            rows = survey(args.run, args.points)
        for name, own in by_client(rows).items():
            slope, rho = own[0]["slope"], own[0]["rho"]
            say(f"{name}: dG/da {slope:.4f}, K {steepness(slope)}, rho {rho:.4f}")
        if drawing := gap_slopes(RunTables(args.run)):
            say(str(add_figure(args.run, TITLE, drawing)))

    return guarded(work, args.debug, "the run itself is unchanged")


if __name__ == "__main__":
    sys.exit(main())
