"""The command python -m rayfed.doctor: says whether an experiment fits and how long it may take."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from rayfed.documents import to_json
from rayfed.terminal.arguments import parser_of
from rayfed.terminal.console import say, screen_of, shown_on
from rayfed.terminal.exit_code import guarded
from rayfed.terminal.table_formats import terminal_width

USAGE = """\
python -m rayfed.doctor [overrides] [--config FILE] [--json] [--report] [--debug]

Takes the overrides of python -m rayfed.run. Prepares the data as a run would,
runs one client in a new process, and says what the cluster has, what the
config needs and how long a round may take, for example
  python -m rayfed.doctor algorithm=fedgcr data=pacs data.root=PACS

With --report it says instead which versions, processor and libraries this
machine has, in a block to paste into a report of a failure.

Exit code: 0 it fits, 1 the client failed, 2 bad input, or it does not fit.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line. Exit code: 0 fits, 1 a client failed, 2 bad input or does not fit."""
    parser = parser_of("rayfed.doctor", USAGE)
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--config", help="a resolved config to start from, such as a run's config.yaml")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--report", action="store_true", help="only describe this machine, to report a failure"
    )
    args = parser.parse_args(argv)
    return guarded(lambda: work(args), args.debug)


def work(args: argparse.Namespace) -> int:
    """Diagnose the experiment and show the result; returns the exit code.

    Raises:
        ConfigError: The input is wrong.
        RayFedError: The client failed.
    """
    if args.report:
        from rayfed.doctor.diagnosis import machine

        say(machine())
        return 0
    from rayfed.doctor.diagnosis import diagnose, report
    from rayfed.experiment.experiment import Experiment

    with shown_on(screen_of(as_json=True)):  # standard output has the report alone
        found = diagnose(Experiment.from_overrides(args.overrides, args.config).config())
    say(to_json(dataclasses.asdict(found), indent=1) if args.json else report(found, terminal_width()))
    for problem in found.problems:
        say(f"error: {problem}", sys.stderr)
    return 2 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
