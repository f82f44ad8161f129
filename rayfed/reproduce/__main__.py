"""The command python -m rayfed.reproduce: runs a paper's table, and compares ours with its numbers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from rayfed.config.papers import MINI, PAPER
from rayfed.errors import ConfigError
from rayfed.terminal.arguments import Arguments, command_line, parser_of
from rayfed.terminal.console import Screen, say, screen_of, stage, use_screen
from rayfed.terminal.exit_code import run_guarded
from rayfed.terminal.supervisor import run_supervised
from rayfed.terminal.table_formats import terminal_width

if TYPE_CHECKING:
    from rayfed.reproduce.job import TableJob
    from rayfed.reproduce.results import Reproduction

USAGE = """\
python -m rayfed.reproduce TABLE [--scale mini|paper] [--seeds N]
    [--cells ROW@SETTING] [--dry-run] [--quiet] [--json] [--debug] [overrides]

Runs every row, setting and seed of a paper's table as one job, and writes our
numbers next to the paper's. The same command again goes on with what is not
finished, for example
  python -m rayfed.reproduce fedgcr/table5 --scale mini --seeds 1
"""


def parser() -> Arguments:
    """The parser of the command line."""
    found = parser_of("rayfed.reproduce", USAGE)
    found.add_argument("table", help="name of the table, such as fedgcr/table5; rayfed list shows all")
    found.add_argument(
        "overrides", nargs="*", default=[], help="key=value for every cell; output=DIR: folder of the job"
    )
    found.add_argument(
        "--scale",
        choices=(MINI, PAPER),
        default=PAPER,
        help="mini: on data and models that ship with RayFed; paper (the default): as in the paper",
    )
    found.add_argument("--seeds", type=int, help="number of seeds; the default is the paper's")
    found.add_argument(
        "--cells",
        action="append",
        default=[],
        metavar="ROW@SETTING",
        help="run these cells only: ROW, @SETTING or ROW@SETTING; may be given several times",
    )
    found.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan, with hours and bytes estimated from one visit of a client; run nothing",
    )
    found.add_argument("--quiet", action="store_true", help="show nothing but the table")
    found.add_argument("--json", action="store_true", help="write the result as JSON to standard output")
    return found


def job_of(args: argparse.Namespace) -> TableJob:
    """The checked job of a command line.

    Raises:
        ConfigError: The input is wrong.
    """
    from rayfed.reproduce.job import make_job

    return make_job(args.table, args.scale, args.seeds, args.cells, args.overrides)


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line. Exit code: 0 done, 1 failed, 2 bad input, 75 busy, 130 interrupted."""
    args = parser().parse_args(argv)
    return run_guarded(lambda: work(args), args.debug, "what is finished is kept; run the same command again")


def work(args: argparse.Namespace) -> None:
    """Run the table, or show what it would take.

    Raises:
        ConfigError: The input is wrong.
        RayFedError: Cells failed.
    """
    with use_screen(screen_of(args.quiet, args.json)):
        stage("reading the configs of all cells", passing=True)
        job = job_of(args)
        with small_scale_named(job):
            if args.dry_run:
                _plan(job)
                return
            found = _run(job, args)
    from rayfed.experiment.single_run import last_words
    from rayfed.reproduce.results import text
    from rayfed.user_files import to_json

    stream = sys.stderr if args.json else None
    say(to_json(found.as_dict(), indent=1) if args.json else f"\n{text(found, terminal_width())}")
    say(f"{job.path}: table.md, table.csv, table.tex, table.html", stream)
    last_words(job.path, lambda text: say(text, stream), job.cells[0].config.report)


@contextmanager
def small_scale_named(job: TableJob) -> Iterator[None]:
    """Let an error about missing data of a paper name the scale that needs none."""
    try:
        yield
    except ConfigError as err:
        if job.scale == PAPER and job.table.small and str(err).startswith("data.root"):
            err.add_note("--scale mini runs the table on data that ship with RayFed")
        raise


def _run(job: TableJob, args: argparse.Namespace) -> Reproduction:
    """Run the job, with a table that fills on a terminal and lines of text elsewhere."""
    from rayfed.reproduce.run_job import JobProgress, live_table, reproduce

    progress = JobProgress(job, command_line())
    quiet = args.quiet or args.json
    _announce(job, quiet)
    try:
        if sys.stdout.isatty() and not quiet:
            with live_table(progress) as tell:
                return reproduce(job, tell, progress)
        with use_screen(Screen()) if quiet else nullcontext():
            return reproduce(job, _teller(quiet), progress)
    except KeyboardInterrupt as err:
        if progress.advice not in getattr(err, "__notes__", ()):  # a cell that ran may have added it
            err.add_note(progress.advice)
        raise


def _teller(quiet: bool) -> Callable[[str], None]:
    return (lambda _: None) if quiet else say


def _announce(job: TableJob, quiet: bool) -> None:
    """Say what is run, and where."""
    if not quiet:
        seeds = ", ".join(map(str, job.seeds))
        say(
            f"{job.table.name} at {job.scale} scale; cells: {len(job.cells)}, rows: {len(job.rows)}, "
            f"settings: {len(job.settings)}, seeds: {seeds}; folder: {job.path}"
        )


def _plan(job: TableJob) -> None:
    """Print the matrix, then the estimate."""
    from rayfed.report.matrix import cells_text
    from rayfed.reproduce.run_job import cost_of, in_words, read_finished

    shown = [(cell.row, cell.setting, cell.config) for cell in job.cells if cell.seed == job.seeds[0]]
    say(cells_text(job.table, job.scale, ", ".join(map(str, job.seeds)), shown))
    finished = read_finished(job)
    waiting = [cell for cell in job.cells if cell.name not in finished]
    say(f"\nfolder: {job.path}; finished: {len(finished)} of {len(job.cells)} cells")
    if waiting:
        say(in_words(cost_of(job, waiting)))


if __name__ == "__main__":
    sys.exit(run_supervised(main))
