"""The command python -m rayfed.reproduce: runs a paper's table, and compares ours with its numbers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from rayfed.config.papers import MINI, PAPER
from rayfed.errors import ConfigError
from rayfed.terminal.arguments import Arguments, parser_of
from rayfed.terminal.console import Screen, say, screen_of, stage, use_screen
from rayfed.terminal.exit_code import run_guarded
from rayfed.terminal.supervisor import run_supervised
from rayfed.terminal.table_formats import terminal_width

if TYPE_CHECKING:
    from rayfed.reproduce.results import Reproduction
    from rayfed.reproduce.table_study import TableStudy

USAGE = """\
python -m rayfed.reproduce TABLE [--scale mini|paper] [--seeds N]
    [--cells ROW@SETTING] [--dry-run] [--quiet] [--json] [--debug] [overrides]

Runs every row, setting and seed of a paper's table as one study, and writes our
numbers next to the paper's. The same command again goes on with what is not
finished. at_once=N runs N cells side by side; by default as many as Ray has
room for, and one with cluster=inline. For example
  python -m rayfed.reproduce fedgcr/table5 --scale mini --seeds 1
"""


def parser() -> Arguments:
    """The parser of the command line."""
    found = parser_of("rayfed.reproduce", USAGE)
    found.add_argument("table", help="name of the table, such as fedgcr/table5; rayfed list shows all")
    found.add_argument(
        "overrides", nargs="*", default=[], help="key=value for every cell; output=DIR, at_once=N"
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


def table_of(args: argparse.Namespace) -> TableStudy:
    """The checked table of a command line.

    Raises:
        ConfigError: The input is wrong.
    """
    from rayfed.reproduce.table_study import table_study

    return table_study(args.table, args.scale, args.seeds, args.cells, args.overrides)


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
        asked = table_of(args)
        with small_scale_named(asked):
            if args.dry_run:
                _plan(asked)
                return
            found = _run(asked, args)
    from rayfed.experiment.single_run import last_words
    from rayfed.reproduce.results import text
    from rayfed.user_files import to_json

    stream = sys.stderr if args.json else None
    say(to_json(found.as_dict(), indent=1) if args.json else f"\n{text(found, terminal_width())}")
    say(f"{asked.path}: table.md, table.csv, table.tex, table.html", stream)
    last_words(asked.path, lambda text: say(text, stream), asked.first.report)


@contextmanager
def small_scale_named(asked: TableStudy) -> Iterator[None]:
    """Let an error about missing data of a paper name the scale that needs none."""
    try:
        yield
    except ConfigError as err:
        if asked.scale == PAPER and asked.table.small and str(err).startswith("data.root"):
            err.add_note("--scale mini runs the table on data that ship with RayFed")
        raise


def _run(asked: TableStudy, args: argparse.Namespace) -> Reproduction:
    """Run the table, with lines that fill on a terminal and lines of text elsewhere."""
    from rayfed.reproduce.live_table import live_table
    from rayfed.reproduce.run_table import TableProgress, reproduce

    quiet = args.quiet or args.json
    _announce(asked, quiet)
    progress = TableProgress(asked, (lambda _: None) if quiet else say)
    if sys.stdout.isatty() and not quiet:
        with live_table(progress):
            return reproduce(asked, progress)
    with use_screen(Screen()) if quiet else nullcontext():
        return reproduce(asked, progress)


def _announce(asked: TableStudy, quiet: bool) -> None:
    """Say what is run, and where."""
    if not quiet:
        seeds = ", ".join(map(str, asked.seeds))
        say(
            f"{asked.table.name} at {asked.scale} scale; cells: {len(asked.configs)}, "
            f"rows: {len(asked.rows)}, settings: {len(asked.settings)}, seeds: {seeds}; folder: {asked.path}"
        )


def _plan(asked: TableStudy) -> None:
    """Print the matrix, then the estimate."""
    from rayfed.report.matrix import cells_text
    from rayfed.reproduce.cost import cost_of, in_words
    from rayfed.reproduce.run_table import finished_before

    first = [(c.row, c.setting, config) for c, config in asked.configs.items() if c.seed == asked.seeds[0]]
    say(cells_text(asked.table, asked.scale, ", ".join(map(str, asked.seeds)), first))
    finished = finished_before(asked)
    waiting = [cell for cell in asked.configs if cell not in finished]
    say(f"\nfolder: {asked.path}; finished: {len(finished)} of {len(asked.configs)} cells")
    if waiting:
        say(in_words(cost_of(asked, waiting)))


if __name__ == "__main__":
    sys.exit(run_supervised(main))
