"""Draws a t-SNE map of features of seen and unseen domains, which `rayfed.analysis.feature_map` computes."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rayfed.analysis.feature_map import distance, features
from rayfed.analysis.reopen import mention
from rayfed.documents import user_folder
from rayfed.errors import ConfigError
from rayfed.report import style
from rayfed.report.run_tables import RunTables
from rayfed.terminal.console import say
from rayfed.terminal.guard import guarded, parser_of
from rayfed.terminal.stages import screen_of, shown_on

USAGE = """\
python -m rayfed.report.feature_map RUN [RUN ...] [--images 300] [--debug]

Draws where the models of finished runs put images of seen and of unseen domains, for example
  python -m rayfed.report.feature_map runs/mine runs/other
"""
MEANING = (
    "Proxy A-distance: 0 if a linear classifier cannot tell images of seen from images of unseen domains, "
    "2 if it always can"
)
SEEN: Mapping[str, Any] = {"marker": "o", "s": 14, "linewidths": 0}
UNSEEN: Mapping[str, Any] = {"marker": "D", "s": 18, "linewidths": 0.6, "edgecolors": "black"}
TITLE = "features of seen and of unseen domains"


def feature_map(run: RunTables) -> style.Drawing | None:
    """Draw the table `features` of a run; None where there is none."""
    return panels([run]) if run.rows("features") else None


@style.in_style
def panels(runs: Sequence[RunTables]) -> style.Drawing:
    """Draw one panel per run, whose domains are those of the first run.

    A domain has the same colour in all figures of the run; unseen domains are diamonds with a black edge.
    """
    figure, axes = style.canvas(1, len(runs), (1.8 + 4.0 * len(runs), 4.6))
    unseen: dict[str, bool] = {}
    for axis, run in zip(axes[0], runs, strict=True):
        rows = run.rows("features")
        unseen |= {row["domain"]: row["unseen"] for row in rows}
        for domain in dict.fromkeys(row["domain"] for row in sorted(rows, key=lambda row: row["unseen"])):
            own = [row for row in rows if row["domain"] == domain]
            x, y = ([row[key] for row in own] for key in ("x", "y"))
            form = UNSEEN if own[0]["unseen"] else SEEN
            axis.scatter(x, y, color=runs[0].look(domain).colour, alpha=0.8, **form)
        title = "\n".join(textwrap.wrap(run.name, 46))
        axis.set(xticks=[], yticks=[], title=f"{title}\nproxy A-distance {distance(rows):.2f}")
        axis.set(xlabel="first coordinate", ylabel="second coordinate")
    what = "Features of seen and unseen domains under the final model (t-SNE)"
    style.heading(figure, what, MEANING)
    entries = []
    for domain in sorted(unseen, key=lambda name: unseen[name]):
        entry = style.line_of(runs[0].look(domain), domain + (" (unseen)" if unseen[domain] else ""))
        edge = "black" if unseen[domain] else runs[0].look(domain).colour
        entry.set(linestyle="", marker="D" if unseen[domain] else "o", markeredgecolor=edge)
        entries.append(entry)
    style.legend(figure, entries, "domain")
    return style.Drawing("feature_map", figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw from the command line. Exit code: 0 drawn, 1 failed, 2 bad input, 130 interrupted."""
    parser = parser_of("rayfed.report.feature_map", USAGE)
    parser.add_argument("runs", type=user_folder, nargs="+", help="finished runs with a held-out domain")
    parser.add_argument(
        "--images", type=int, default=300, help="number of images of all seen domains together"
    )
    args = parser.parse_args(argv)

    def work() -> None:
        if args.images < 50:
            raise ConfigError(f"--images: {args.images} is too few for t-SNE; at least 50")
        with shown_on(screen_of()):
            for folder in args.runs:
                say(f"{folder}: proxy A-distance {distance(features(folder, args.images)):.2f}")
        picture = panels([RunTables(run) for run in args.runs]).save(args.runs[0])
        mention(args.runs[0], TITLE, picture)
        say(str(picture))

    return guarded(work, args.debug, "the run itself is unchanged")


if __name__ == "__main__":
    sys.exit(main())
