"""The command python -m rayfed.report: writes one HTML page about runs, which opens without a network."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rayfed.errors import ConfigError
from rayfed.report.page.render import JSON, TEX, page_file, write_report
from rayfed.terminal.arguments import parser_of
from rayfed.terminal.console import say, screen_of, use_screen
from rayfed.terminal.exit_code import run_guarded
from rayfed.user_files import user_folder, user_path

USAGE = """\
python -m rayfed.report RUN... [--out FILE] [--against NAME] [--margin NUMBER]

Writes one HTML file about the runs in these folders, a JSON file with the same
numbers and, of several seeds, a LaTeX file with means and tested differences.
The page loads nothing from elsewhere. A folder is that of a run, finished or
not, of a study (as of compare and protocol), of a sweep, or of a reproduced
table.
For example
  python -m rayfed.report runs/mine
  python -m rayfed.report runs/seed0 runs/seed1 runs/seed2 --out seeds.html
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write from the command line. Exit code: 0 written, 1 failed, 2 bad input, 130 interrupted."""
    parser = parser_of("rayfed.report", USAGE)
    parser.add_argument(
        "runs", nargs="+", type=user_folder, metavar="RUN", help="folder of a run, or of several"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the file, NAME.html; by default report.html in the folder, or here for several folders",
    )
    parser.add_argument(
        "--against",
        metavar="NAME",
        help="the method that the others are compared with; by default each pair is",
    )
    parser.add_argument(
        "--margin",
        metavar="NUMBER",
        help="largest difference that counts as equally good, in the unit of the score (0.02: two points)",
    )
    args = parser.parse_args(argv)

    def work() -> None:
        margin = None if args.margin is None else number_of("--margin", args.margin)
        file = page_file(args.runs, user_path(args.out, "--out") if args.out else None)
        with use_screen(screen_of()):
            write_report(args.runs, file, against=args.against, margin=margin)
        tables = file.with_suffix(TEX)
        latex = f"; means and differences for LaTeX: {tables}" if tables.exists() else ""
        say(f"{file}  {_size(file)}; the same numbers: {file.with_suffix(JSON)}{latex}")

    return run_guarded(work, args.debug, "the runs themselves are unchanged")


def number_of(name: str, text: str) -> float:
    """A positive number of the command line. Args: name: of the option.

    Raises:
        ConfigError: It is none.
    """
    with suppress(ValueError):
        if 0 < (number := float(text)) < math.inf:
            return number
    raise ConfigError(f"{name}: {text!r} is no positive number, such as 0.02 for two points of an accuracy")


def _size(file: Path) -> str:
    return f"{file.stat().st_size / 1e6:.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
