"""Draws a t-SNE map of features of seen and unseen domains, which `rayfed.analysis.feature_map` computes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rayfed.analysis.feature_map import distance, features
from rayfed.analysis.reopen import mention
from rayfed.documents import user_folder
from rayfed.errors import ConfigError
from rayfed.record.readers import read_table
from rayfed.report.group_figures import save_figure
from rayfed.terminal.console import say
from rayfed.terminal.guard import guarded, parser_of

USAGE = """\
python -m rayfed.report.feature_map RUN [RUN ...] [--images 300] [--debug]

Draws where the models of finished runs put images of seen and of unseen domains, for example
  python -m rayfed.report.feature_map runs/mine runs/other
"""
TITLE = "features of seen and of unseen domains"


def feature_map(folder: Path) -> Path | None:
    """Draw the table `features` of a run; None where there is none."""
    return panels([folder]) if read_table(folder, "features") else None


def panels(folders: Sequence[Path]) -> Path:
    """Draw one panel per run; the figure is written into the folder of the first one."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(folders), figsize=(5 * len(folders), 4.5), squeeze=False)
    for axis, folder in zip(axes[0], folders, strict=True):
        rows = read_table(folder, "features")
        for kind, colour in (("seen", "tab:blue"), ("unseen", "tab:red")):
            of_kind = [row for row in rows if row["unseen"] == (kind == "unseen")]
            names = ", ".join(dict.fromkeys(row["domain"] for row in of_kind))
            x, y = ([row[key] for row in of_kind] for key in ("x", "y"))
            axis.scatter(x, y, s=8, alpha=0.6, color=colour, label=f"{kind}: {names}")
        axis.set(xticks=[], yticks=[], title=f"{folder.name}: proxy A-distance {distance(rows):.2f}")
        axis.legend(loc="upper right", fontsize=7)
    return save_figure(figure, folders[0], "feature_map")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw from the command line. Exit code: 0 drawn, 1 failed, 2 bad input, 130 interrupted."""
    parser = parser_of("rayfed.report.feature_map", USAGE)
    parser.add_argument("runs", type=user_folder, nargs="+", help="finished runs with a held-out domain")
    parser.add_argument(
        "--images", type=int, default=300, help="number of images of all seen domains together"
    )
    args = parser.parse_args(argv)

    def work() -> None:
        import matplotlib as mpl

        mpl.use("Agg")
        if args.images < 50:
            raise ConfigError(f"--images: {args.images} is too few for t-SNE; at least 50")
        for folder in args.runs:
            say(f"{folder}: proxy A-distance {distance(features(folder, args.images)):.2f}")
        picture = panels(args.runs)
        mention(args.runs[0], TITLE, picture)
        say(str(picture))

    return guarded(work, args.debug, "the run itself is unchanged")


if __name__ == "__main__":
    sys.exit(main())
