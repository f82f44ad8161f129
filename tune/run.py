"""The command python -m tune.run: runs a sweep and reports the best config."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from rayfed.errors import ConfigError, RayFedError
from rayfed.terminal.arguments import parser_of
from rayfed.terminal.console import say, screen_of, use_screen
from rayfed.terminal.exit_code import run_guarded
from rayfed.terminal.supervisor import note_advice, run_supervised
from rayfed.terminal.table_formats import terminal_width
from rayfed.user_files import to_json, user_path

USAGE = """\
python -m tune.run sweep=NAME [trials=N] [seeds=N] [output=DIR]
    [overrides] [--json] [--quiet] [--list] [--debug]
python -m tune.run resume=DIR [trials=N]

Overrides are those of python -m rayfed.run (rounds=5, data.limit=24) and keys
of the sweep, for example
  python -m tune.run sweep=fedgcr trials=20 scheduler=asha
  python -m tune.run sweep=fedgcr objective=[accuracy,bytes_up] searcher=nsga2
  python -m tune.run sweep=fedgcr 'space.server.q={loguniform: [0.01, 100]}'
  python -m tune.run sweep=fedgcr space.local.tau=null
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line. Exit code: 0 done, 1 failed, 2 bad input, 75 busy, 130 interrupted."""
    parser = parser_of("tune.run", USAGE)
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quiet", action="store_true", help="show nothing but the result")
    parser.add_argument("--list", action="store_true", help="show every sweep")
    args = parser.parse_args(argv)
    logging.getLogger("ray").setLevel(logging.ERROR)
    return run_guarded(lambda: work(args), args.debug, "finished rounds of all trials are kept")


def work(args: argparse.Namespace) -> None:
    """Run, resume or list sweeps.

    Raises:
        ConfigError: The input is wrong.
        RayFedError: No trial finished.
    """
    from tune.sweep import load_sweep, sweep_names

    if args.list:
        say("\n".join(sweep_names()))
        return
    from tune import checks, engine, report

    resumes = [text for text in args.overrides if text.startswith("resume=")]
    if resumes:
        others = [text for text in args.overrides if text not in resumes]
        more = [text.removeprefix("trials=") for text in others if text.startswith("trials=")]
        if len(others) > len(more):
            raise ConfigError("resume: takes no other override than trials=N; a sweep continues as it began")
        folder = user_path(resumes[0].removeprefix("resume="), "resume")
        trials = [int(text) if text.isdecimal() else text for text in more]
        search, here = checks.open_sweep(folder, *trials[:1])
    else:
        sweep, overrides = load_sweep(args.overrides)
        search, here = checks.check_sweep(sweep, overrides, None, checks.new_folder(sweep)), Path.cwd()
    advice = f"continue with: python -m tune.run resume={search.path}"
    note_advice(advice)
    try:
        with contextlib.chdir(here), use_screen(screen_of(args.quiet or args.json)):
            _, outcomes = engine.run_sweep(search, args.quiet or args.json, bool(resumes))
    except KeyboardInterrupt as err:
        err.add_note(f"finished rounds of all trials are kept; {advice}")
        raise
    table = report.table(outcomes)
    if table is None:
        reasons = sorted({t.error for t in outcomes.trials if t.error})
        raise RayFedError(f"none of {len(outcomes.trials)} trials finished; {'; '.join(reasons[:3])}")
    say(to_json(report.summary(outcomes)) if args.json else f"\n{table.text(terminal_width())}")


if __name__ == "__main__":
    sys.exit(run_supervised(main))
