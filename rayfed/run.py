"""The command python -m rayfed.run: runs one experiment and shows its table of results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rayfed.errors import ConfigError
from rayfed.terminal.arguments import parser_of
from rayfed.terminal.console import say, screen_of, stage, use_screen
from rayfed.terminal.exit_code import ending
from rayfed.terminal.supervisor import run_supervised
from rayfed.user_files import user_path

if TYPE_CHECKING:
    from rayfed.config.schema import Request
    from rayfed.experiment.single_run import Show

USAGE = """\
python -m rayfed.run [overrides] [--config FILE] [--print-config]
    [--dry-run] [--or-resume] [--quiet] [--json] [--debug]
python -m rayfed.run --list [--json]

Overrides are group=name (algorithm, data, model, tuning, cluster, experiment)
and key=value, for example
  python -m rayfed.run algorithm=fedprox local.mu=0.1 rounds=5
  python -m rayfed.run data=pacs data.root=PACS output=runs/mine

python -m rayfed.doctor takes the same overrides and says, without running the
experiment, whether it fits on this machine and how long it may take.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line. Exit code: 0 done, 1 failed, 2 bad input, 75 busy, 130 interrupted."""
    parser = parser_of("rayfed.run", USAGE)
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--config", help="a resolved config to start from, such as a run's config.yaml")
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved config as YAML and run nothing"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would run, with which data and model: each cell of a paper's table, or each "
        "compared method, whose data, model and folder are checked as before a run; run nothing, and ask no "
        "cluster, as the doctor does",
    )
    parser.add_argument(
        "--or-resume",
        action="store_true",
        help="continue the run in the folder `output` of this config, if one is there",
    )
    parser.add_argument("--quiet", action="store_true", help="show errors only")
    parser.add_argument(
        "--json", action="store_true", help="write one JSON object per round to standard output"
    )
    parser.add_argument(
        "--list", action="store_true", help="list every method, tuning, model, data set and experiment"
    )
    args = parser.parse_args(argv)
    with ending(args.debug, "nothing was written; run the command again") as end:
        work(args)
    return end.code


def work(args: argparse.Namespace) -> None:
    """Run the experiment of the overrides, print its config, or list what can be chosen.

    Raises:
        ConfigError: The input is wrong.
        RayFedError: The run failed.
    """
    if args.list:
        from rayfed.config.catalog import show

        show(args.json)
        return
    if args.dry_run:
        from rayfed.report.matrix import is_table, matrix_of

        say(matrix_of(args.overrides, args.config))
        if not is_table(args.overrides, args.config):
            from rayfed.executors.kinds.base import kind_of
            from rayfed.experiment import runner
            from rayfed.experiment.experiment import Experiment
            from rayfed.experiment.study import from_command

            config = Experiment.from_overrides(args.overrides, args.config).config()
            if from_command.makes_study(config):
                from_command.check(config)
            else:
                runner.check(config.alone())
            say("checked: config, data, model and folder of the run, as before its start")
            if kind_of(config.cluster).needs_cluster:
                say("not checked: whether it fits on the cluster; see python -m rayfed.doctor")
        return
    with use_screen(screen_of(args.quiet or args.print_config, args.json)):
        stage("reading the config", passing=True)
        from rayfed.experiment.experiment import Experiment

        config = Experiment.from_overrides(args.overrides, args.config).config()
        if args.print_config:
            from rayfed.config.look_up import design_of
            from rayfed.config.schema import compatible_parts, to_yaml
            from rayfed.engine.setup import without_values
            from rayfed.experiment.study.from_command import makes_study

            compatible_parts(config)
            without_values(design_of(config))
            printed = config if makes_study(config) else config.alone()
            say(to_yaml(printed).rstrip("\n"))
            return
        from rayfed.experiment.runner import Runner
        from rayfed.experiment.single_run import Show
        from rayfed.experiment.study import from_command

        shown = Show(args.quiet, args.json)
        if args.or_resume and has_begun(config):
            resume(config, shown)
        elif from_command.makes_study(config):
            from_command.begin(config, shown)
        else:
            Runner(show=shown).start(config.alone())


def has_begun(config: Request) -> bool:
    """Whether the folder of a config holds a run that can be continued, or a study.

    Raises:
        ConfigError: The config names no folder, so that no command finds its run again.
    """
    from rayfed.record.readers import STUDY, has_checkpoint

    if config.output is None:
        raise ConfigError("output: --or-resume needs the folder of the run, such as output=runs/mine")
    folder = user_path(config.output, "output")
    return has_checkpoint(folder) or (folder / STUDY).exists()


def resume(config: Request, show: Show) -> None:
    """Continue the run, or the study, in the folder of a config.

    Raises:
        ConfigError: It has another config; the message names the key.
    """
    from rayfed.config.schema import load_run
    from rayfed.experiment.study import from_command
    from rayfed.record.readers import STUDY
    from rayfed.resume import continuing, go_on

    folder = user_path(str(config.output), "output")
    if (folder / STUDY).exists():
        from_command.go_on(folder, continuing(folder, load_run(folder), config), show)
    else:
        go_on(folder, lambda: continuing(folder, load_run(folder), config), show)


if __name__ == "__main__":
    sys.exit(run_supervised(main))
