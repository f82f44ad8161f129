"""The command python -m rayfed.report: writes one HTML page about runs, which opens without a network."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rayfed.report.page.render import JSON, TEX, page_file, write_report
from rayfed.terminal.arguments import parser_of
from rayfed.terminal.console import say, screen_of, use_screen
from rayfed.terminal.exit_code import run_guarded
from rayfed.user_files import user_folder, user_path

USAGE = """\
python -m rayfed.report RUN... [--out FILE] [--debug]

Writes one HTML file about the runs in these folders, a JSON file with the same
numbers and, of several seeds, a LaTeX file with the table of means. The page
loads nothing from elsewhere. A folder is that of a run, finished or not, of a
study (as of compare and protocol), of a sweep, or of a reproduced table.
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
    args = parser.parse_args(argv)

    def work() -> None:
        file = page_file(args.runs, user_path(args.out, "--out") if args.out else None)
        with use_screen(screen_of()):
            write_report(args.runs, file)
        tables = file.with_suffix(TEX)
        latex = f"; means over seeds for LaTeX: {tables}" if tables.exists() else ""
        say(f"{file}  {_size(file)}; the same numbers: {file.with_suffix(JSON)}{latex}")

    return run_guarded(work, args.debug, "the runs themselves are unchanged")


def _size(file: Path) -> str:
    return f"{file.stat().st_size / 1e6:.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
