"""The command python -m rayfed.view: shows the rounds of a run, finished or still running."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rayfed.errors import ConfigError
from rayfed.record.locks import is_locked
from rayfed.record.readers import STUDY, read_json, reading
from rayfed.terminal.arguments import parser_of
from rayfed.terminal.console import say, showing, teller
from rayfed.terminal.exit_code import run_guarded
from rayfed.terminal.table_formats import terminal_width
from rayfed.user_files import check_run_folder, user_folder

if TYPE_CHECKING:
    from rayfed.types import Row

USAGE = """\
python -m rayfed.view RUN [--follow] [--json] [--debug]

Shows the rounds of the run in the folder RUN and the table of the last
evaluated one. With --follow it shows rounds as they finish, until the run
ends; with --json it writes one JSON object a round instead. For example
  python -m rayfed.view runs/mine --follow
"""

PAUSE = 0.5  # seconds between two readings of the rows
PATIENCE = 60.0  # seconds to wait for a process to write the run, because actors take long to start


def view(path: Path, following: bool = False, as_json: bool = False) -> None:
    """Show the rounds of a run and the table of the last evaluated one.

    Args:
        following: Wait for more rounds until the run is finished or no process writes it.
        as_json: Write one JSON object a round to standard output, and all else to standard error.

    Raises:
        ConfigError: The folder holds no run, or one that cannot be read.
    """
    from rayfed.record.recorded_run import RecordedRun
    from rayfed.report.final_table import final_table

    path = one_run(path)
    rounds = planned_rounds(path)
    with reading(path):
        json_of = path if as_json else None
        rows_shown = []
        with showing(rounds, as_json, json_of) as show:
            for row in _rows(path, following):
                show(row)
                rows_shown.append(row)
        run = RecordedRun(path)
        if run.reported and not as_json:
            say("\n" + final_table(run).text(terminal_width()))
    if not run.is_finished:
        ended = "" if is_running(path) else ", and it is not running now"
        teller(as_json=as_json)(f"{path}: {len(rows_shown)} of {rounds} rounds{ended}")


def one_run(path: Path) -> Path:
    """The folder itself; of a study without a protocol, that of its first method.

    Raises:
        ConfigError: The folder holds several runs of one method; names them.
    """
    if not (path / STUDY).exists():
        return path
    tree = read_json(path / STUDY, dict)
    with reading(path / STUDY):
        folders = [str(cell["folder"]) for cell in tree["cells"]]
        rows = [str(cell["label"]) for cell in tree["cells"]]
    if len(set(rows)) < len(rows) or not folders:
        raise ConfigError(
            f"{path}: holds several runs; give one, such as {folders[0]}; rayfed ps {path} lists them"
        )
    others = f"; the others are in {', '.join(folders[1:])}" if folders[1:] else ""
    teller(as_json=True)(f"{path / folders[0]}{others}")
    return path / folders[0]


def planned_rounds(path: Path) -> int:
    """Number of planned rounds of the run in a folder.

    Raises:
        ConfigError: The folder holds no run.
    """
    from rayfed.record.recorded_run import RecordedRun

    check_run_folder(path)
    with reading(path, f"{path}: holds no run (config.yaml is not that of a run)"):
        return RecordedRun(path).planned


def is_running(path: Path) -> bool:
    """Whether a process of this machine writes the run."""
    return is_locked(path)


def _rows(path: Path, following: bool) -> Iterator[Row]:
    """Each row once, in order; rounds that are repeated after a crash are yielded the first time only."""
    from rayfed.record.recorded_run import RecordedRun

    number = 0
    heard = time.monotonic()
    while True:
        run = RecordedRun(path)  # a new one each time, since it reads each file once
        for row in run.rounds:
            if row["round"] > number:
                number = row["round"]
                heard = time.monotonic()
                yield row
        if not following or run.is_finished:
            return
        if is_running(path):
            heard = time.monotonic()
        elif time.monotonic() - heard > PATIENCE:
            return
        time.sleep(PAUSE)


def main(argv: Sequence[str] | None = None) -> int:
    """Look from the command line. Exit code: 0 shown, 2 no run there, 130 interrupted."""
    parser = parser_of("rayfed.view", USAGE)
    parser.add_argument("run", type=user_folder, help="folder of the run")
    parser.add_argument("--follow", action="store_true", help="show rounds as they finish")
    parser.add_argument("--json", action="store_true", help="one JSON object a round on standard output")
    args = parser.parse_args(argv)
    return run_guarded(lambda: view(args.run, args.follow, args.json), args.debug)


if __name__ == "__main__":
    sys.exit(main())
