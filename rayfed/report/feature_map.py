"""Draws a t-SNE map of features, by domain or by class, which `rayfed.analysis.feature_map` computes."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rayfed.analysis.feature_map import distance, features, same_class_share
from rayfed.documents import user_folder
from rayfed.errors import ConfigError
from rayfed.report import style
from rayfed.report.document import add_figure
from rayfed.report.run_tables import RunTables
from rayfed.terminal.console import say
from rayfed.terminal.guard import guarded, parser_of
from rayfed.terminal.stages import screen_of, shown_on

USAGE = """\
python -m rayfed.report.feature_map RUN [RUN ...] [--images 300]
    [--by domain] [--debug]

Draws where the models of finished runs put images of seen and of unseen
domains, or test images of ten classes, for example
  python -m rayfed.report.feature_map runs/mine runs/other
  python -m rayfed.report.feature_map runs/mine --by class
"""
MEANING = (
    "Proxy A-distance: 0 if a linear classifier cannot tell images of seen from images of unseen domains, "
    "2 if it always can"
)
SEEN: Mapping[str, Any] = {"marker": "o", "s": 14, "linewidths": 0}
UNSEEN: Mapping[str, Any] = {"marker": "D", "s": 18, "linewidths": 0.6, "edgecolors": "black"}
UNSEEN_MARK = " (unseen)"
TITLE = "features of seen and of unseen domains"


def feature_map(run: RunTables) -> style.Drawing | None:
    """Draw the table `features` of a run; None where there is none."""
    return panels([run]) if run.rows("features") else None


@style.in_style
def panels(runs: Sequence[RunTables]) -> style.Drawing:
    """Draw one panel per run: seen and unseen domains, or, where no image is of an unseen domain, classes.

    A domain has the same colour in all figures of the run; unseen domains are diamonds with a black edge.
    """
    figure, axes = style.canvas(1, len(runs), (1.8 + 4.0 * len(runs), 4.6))
    tables = [run.rows("features") for run in runs]
    entries: dict[str, Any] = {}
    by_class = not any(row["unseen"] for rows in tables for row in rows)
    for axis, run, rows in zip(axes[0], runs, tables, strict=True):
        entries |= _classes(axis, rows) if by_class else _domains(axis, rows, runs[0])
        title = "\n".join(textwrap.wrap(run.name, 46))
        axis.set(xticks=[], yticks=[], title=f"{title}\n{separation(rows)}")
        axis.set(xlabel="first coordinate", ylabel="second coordinate")
    what = "test images by class" if by_class else "seen and unseen domains"
    meaning = () if by_class else (MEANING,)
    style.heading(figure, f"Features of {what} under the final model (t-SNE)", *meaning)
    style.legend(
        figure,
        [entries[name] for name in sorted(entries, key=_unseen_last)],
        "class" if by_class else "domain",
    )
    return style.Drawing("feature_map", figure)


def _unseen_last(name: str) -> bool:
    return name.endswith(UNSEEN_MARK)


def separation(rows: Sequence[Mapping[str, Any]]) -> str:
    """Separation of the images of a table `features`, in words."""
    if any(row["unseen"] for row in rows):
        return f"proxy A-distance {distance(rows):.2f}"
    return f"nearest neighbour of the same class: {100 * same_class_share(rows):.0f} %"


def _domains(axis: Any, rows: Sequence[Mapping[str, Any]], first: RunTables) -> dict[str, Any]:
    """Draw the images by domain; entries of the legend by name."""
    entries = {}
    for domain in dict.fromkeys(row["domain"] for row in sorted(rows, key=lambda row: row["unseen"])):
        own = [row for row in rows if row["domain"] == domain]
        x, y = ([row[key] for row in own] for key in ("x", "y"))
        unseen = own[0]["unseen"]
        look = first.look(domain)
        axis.scatter(x, y, color=look.colour, alpha=0.8, **(UNSEEN if unseen else SEEN))
        name = domain + (UNSEEN_MARK if unseen else "")
        entries[name] = style.line_of(look, name)
        edge = "black" if unseen else look.colour
        entries[name].set(linestyle="", marker="D" if unseen else "o", markeredgecolor=edge)
    return entries


def _classes(axis: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Draw the images by class; entries of the legend by name."""
    known = style.looks(dict.fromkeys(row["class"] for row in sorted(rows, key=lambda row: row["label"])))
    entries = {}
    for name, look in known.items():
        own = [row for row in rows if row["class"] == name]
        x, y = ([row[key] for row in own] for key in ("x", "y"))
        axis.scatter(x, y, color=look.colour, marker=look.marker, s=14, alpha=0.8)
        entries[name] = style.line_of(look, name)
        entries[name].set_linestyle("")
    return entries


def main(argv: Sequence[str] | None = None) -> int:
    """Draw from the command line. Exit code: 0 drawn, 1 failed, 2 bad input, 130 interrupted."""
    parser = parser_of("rayfed.report.feature_map", USAGE)
    parser.add_argument("runs", type=user_folder, nargs="+", help="finished runs, with a held-out domain")
    parser.add_argument(
        "--by", choices=("domain", "class"), default="domain", help="by class, no domain must be held out"
    )
    parser.add_argument(
        "--images", type=int, default=300, help="number of images of all seen domains together"
    )
    args = parser.parse_args(argv)

    def work() -> None:
        if args.images < 50:
            raise ConfigError(f"--images: {args.images} is too few for t-SNE; at least 50")
        with shown_on(screen_of()):
            for folder in args.runs:
                say(f"{folder}: {separation(features(folder, args.images, args.by == 'class'))}")
        drawing = panels([RunTables(run) for run in args.runs])
        say(str(add_figure(args.runs[0], TITLE, drawing)))

    return guarded(work, args.debug, "the run itself is unchanged")


if __name__ == "__main__":
    sys.exit(main())
