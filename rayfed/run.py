"""python -m rayfed.run: one experiment, from overrides to a table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rayfed.terminal.console import say
from rayfed.terminal.guard import guarded, parser_of

USAGE = """\
python -m rayfed.run [overrides] [--config FILE] [--print-config] [--quiet] [--json] [--debug]
python -m rayfed.run --list [--json]

Overrides are group=name (algorithm, data, model, tuning, cluster, experiment) and key=value, for example
  python -m rayfed.run algorithm=fedprox local.mu=0.1 data=pacs data.root=PACS rounds=5 output=runs/mine

python -m rayfed.doctor takes the same and says, without running it, whether it fits and how long it may take.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line. Exit code: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    parser = parser_of("rayfed.run", USAGE)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--config", help="a resolved config to start from, such as a run's config.yaml")
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved config as YAML and run nothing"
    )
    parser.add_argument("--quiet", action="store_true", help="show nothing but errors")
    parser.add_argument("--json", action="store_true", help="one JSON object a round on standard output")
    parser.add_argument("--list", action="store_true", help="show everything that can be chosen")
    args = parser.parse_args(argv)
    return guarded(lambda: work(args), args.debug, "finished rounds are kept")


def work(args: argparse.Namespace) -> None:
    """Do what was asked.

    Raises:
        ConfigError: Bad input.
        RayFedError: The run failed.
    """
    if args.list:
        from rayfed.config.catalog import show

        show(args.json)
        return
    from rayfed.config.schema import load_config, to_yaml

    config = load_config(args.overrides, args.config)
    if args.print_config:
        say(to_yaml(config).rstrip("\n"))
        return
    from rayfed.experiment.simulate import execute

    execute(config, args.quiet, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
