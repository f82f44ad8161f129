"""The command python -m rayfed.ps: lists runs and studies in a folder, and how far each of them is."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rayfed.terminal.arguments import parser_of
from rayfed.terminal.console import say
from rayfed.terminal.exit_code import run_guarded
from rayfed.terminal.table_formats import Column, Table, terminal_width
from rayfed.user_files import to_json, user_folder

USAGE = """\
python -m rayfed.ps [FOLDER] [--json] [--debug]

Lists the runs and the studies in FOLDER, by default runs/, or the cells of
the study in FOLDER: their state, the rounds or cells that are finished, and
the score of the last evaluated round. For example
  python -m rayfed.ps runs/rates
"""

COLUMNS = ("folder", "what", "state", "done", "score")


def main(argv: Sequence[str] | None = None) -> int:
    """List from the command line. Exit code: 0 listed, 2 nothing there, 130 interrupted."""
    parser = parser_of("rayfed.ps", USAGE)
    parser.add_argument(
        "folder", nargs="?", default=Path("runs"), type=user_folder, help="folder of runs, or of a study"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object for each on standard output")
    args = parser.parse_args(argv)

    def work() -> None:
        from rayfed.experiment.listed import listed

        rows = [asdict(each) for each in listed(args.folder)]
        if args.json:
            say("\n".join(to_json(row) for row in rows))
        else:
            table = Table(
                str(args.folder), [Column(name) for name in COLUMNS], [[*row.values()] for row in rows]
            )
            say(table.text(terminal_width()))

    return run_guarded(work, args.debug)


if __name__ == "__main__":
    sys.exit(main())
