"""python -m rayfed.run: one experiment, from overrides to a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rayfed.terminal.arguments import Arguments
from rayfed.terminal.console import say
from rayfed.terminal.guard import guarded

USAGE = """\
python -m rayfed.run [overrides] [--config FILE] [--quiet] [--json] [--debug]

Overrides are group=name (algorithm, data, model, tuning, cluster, experiment) and key=value, for example
  python -m rayfed.run algorithm=fedprox local.mu=0.1 data=pacs data.root=PACS rounds=5 output=runs/mine

python -m rayfed.doctor takes the same and says, without running it, whether it fits and how long it may take.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line. Exit code: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    parser = Arguments("rayfed.run", usage=USAGE, add_help=True)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--config", help="a resolved config to start from, such as a run's config.yaml")
    parser.add_argument("--quiet", action="store_true", help="show nothing but errors")
    parser.add_argument("--json", action="store_true", help="one JSON object a round on standard output")
    parser.add_argument("--list", action="store_true", help="show every algorithm, tuning, model and data")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = parser.read(argv)

    def work() -> None:
        from rayfed.config.catalog import catalog
        from rayfed.config.schema import load_config
        from rayfed.experiment.simulate import execute

        if args.list:
            say(catalog())
        else:
            execute(load_config(args.overrides, args.config), args.quiet, as_json=args.json)

    return guarded(work, args.debug)


if __name__ == "__main__":
    sys.exit(main())
