"""The command python -m rayfed.resume: continues an interrupted run, or adds rounds to a finished one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rayfed.errors import ConfigError, RayFedError
from rayfed.terminal.arguments import parser_of
from rayfed.terminal.console import screen_of, stage, use_screen
from rayfed.terminal.exit_code import run_guarded
from rayfed.terminal.supervisor import run_supervised
from rayfed.user_files import check_run_folder, user_folder

if TYPE_CHECKING:
    from rayfed.config.schema import Config, Request
    from rayfed.experiment.single_run import Show

USAGE = """\
python -m rayfed.resume DIR [rounds=+N] [overrides] [--quiet] [--json]
    [--debug]

Continues the run in DIR after its last checkpoint. Tensors and tables become
the same as those of a run that was never interrupted. Overrides may change
where clients run, what is saved and when it stops, for example
  python -m rayfed.resume runs/mine rounds=+20 cluster.actors=4
"""


def config_to_continue(path: Path, overrides: Sequence[str] = ()) -> Request:
    """The config with which a run is continued.

    Args:
        overrides: `key=value`; `rounds=+N` adds N rounds.

    Raises:
        ConfigError: The folder holds no run, or an override would change its result; the message names the
            key.
    """
    from rayfed.config.schema import load_run

    before = load_run(path)
    more = [text for text in overrides if text.startswith("rounds=")]
    config = load_run(path, [text for text in overrides if text not in more])
    rounds = before.rounds if not more else _rounds(more[-1].removeprefix("rounds="), before.rounds)
    return continuing(path, before, replace(config, rounds=rounds))


def continuing(path: Path, before: Config, config: Request) -> Request:
    """The config with which a run is continued, whose own config `before` is.

    Args:
        config: That config, with other values of keys that may change.

    Raises:
        ConfigError: Another value would change the result; the message names the key.
    """
    from rayfed.config.config_changes import BINDING, HARMLESS, changes, is_about_the_end
    from rayfed.config.schema import to_dict
    from rayfed.experiment.go_on import check_goes_on

    for key, old, new in changes(to_dict(before), to_dict(config)):
        if is_about_the_end(key):
            continue
        raise ConfigError(
            f"{key}: {new!r} would change the result of {path}, which began with {old!r}; start a new "
            f"run, or change only {', '.join(HARMLESS)}, rounds and stop, but not {', '.join(BINDING)}"
        )
    check_goes_on(config, path)
    rounds = config.rounds
    if rounds != before.rounds and before.train.schedule != "constant":
        raise ConfigError(
            f"rounds: {rounds} would change the learning rates of the {before.rounds} rounds of {path}, "
            f"which train.schedule={before.train.schedule} spreads over all rounds; start a new run"
        )
    if rounds != before.rounds and before.privacy.epsilon is not None:
        raise ConfigError(
            f"rounds: {rounds} would need another noise than the {before.rounds} of {path}, which have that "
            f"of privacy.epsilon={before.privacy.epsilon:g}; start a new run"
        )
    return replace(config, output=str(path), overwrite=False)


def why_finished(config: Config, path: Path) -> str:
    """Why a run has all its rounds; empty: it has not."""
    from rayfed.evaluation.stopping import Stopping
    from rayfed.record.recorded_run import RecordedRun

    with suppress(RayFedError):  # the run itself mends a damaged file, or names it
        rows = RecordedRun(path).rounds
        if len(rows) >= config.rounds:
            return f"all {config.rounds} rounds are finished; rounds=+20 adds 20 more"
        ended = Stopping(config.stop, rows)
        if ended.reason:
            return f"stop ended it after round {ended.round}: {ended.reason}; stop.{ended.key}=null goes on"
    return ""


def _rounds(text: str, before: int) -> int:
    number = text.removeprefix("+")
    if not number.isdecimal():
        raise ConfigError(f"rounds: {text!r} is not a number of rounds; write rounds=+20 for 20 more")
    rounds = before + int(number) if text.startswith("+") else int(number)
    if rounds < before:
        raise ConfigError(
            f"rounds: {rounds} is fewer than the {before} of this run; write rounds=+20 for 20 more"
        )
    return rounds


def _continue_study(path: Path, overrides: Sequence[str], show: Show) -> None:
    """Continue the runs of a study.

    Raises:
        ConfigError: A program or a file of `rayfed study` began it, and knows what its cells are.
    """
    from rayfed.experiment.study.from_command import go_on
    from rayfed.record.readers import SWEEP

    if (path / SWEEP).exists():
        check_run_folder(path)  # names the command that continues it
    if not (path / "config.yaml").exists():
        raise ConfigError(
            f"{path}: holds a study of a program or of rayfed study FILE.yaml; run that again to continue it"
        )
    with use_screen(screen_of(show.quiet, show.as_json)):
        stage("reading the config", passing=True)
        go_on(path, config_to_continue(path, overrides), show)


def go_on(path: Path, config_of: Callable[[], Request], show: Show) -> None:
    """Continue a run. Args: config_of: gives its config, once no other process can write the run."""
    from rayfed.experiment.runner import Runner
    from rayfed.record.claim import claim_again

    with claim_again(path) as claim:
        stage("reading the config", passing=True)
        config = config_of()
        if words := why_finished(config, path):
            stage(words)
        Runner(show=show).start(config.alone(), claim)


def main(argv: Sequence[str] | None = None) -> int:
    """Continue from the command line. Exit code: 0 done, 1 failed, 2 bad input, 75 busy, 130 interrupted."""
    parser = parser_of("rayfed.resume", USAGE)
    parser.add_argument("run", type=user_folder, help="folder of the run")
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--quiet", action="store_true", help="show errors only")
    parser.add_argument(
        "--json", action="store_true", help="write one JSON object per round to standard output"
    )
    args = parser.parse_args(argv)

    def work() -> None:
        from rayfed.experiment.single_run import Show
        from rayfed.record.readers import STUDY

        show = Show(args.quiet, args.json)
        if (args.run / STUDY).exists():
            _continue_study(args.run, args.overrides, show)
            return
        check_run_folder(args.run)
        with use_screen(screen_of(args.quiet, args.json)):
            go_on(args.run, lambda: config_to_continue(args.run, args.overrides), show)

    return run_guarded(work, args.debug, "what was finished is kept")


if __name__ == "__main__":
    sys.exit(run_supervised(main))
