"""python -m rayfed.resume: go on with a run that was killed, or make a finished one longer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rayfed.config.changes import HARMLESS, changes
from rayfed.errors import ConfigError
from rayfed.terminal.arguments import user_folder
from rayfed.terminal.guard import guarded, parser_of
from rayfed.terminal.supervisor import supervised

if TYPE_CHECKING:
    from rayfed.config.schema import Config

USAGE = """\
python -m rayfed.resume DIR [rounds=+N] [overrides] [--quiet] [--json] [--debug]

Goes on from the last checkpoint of the run in DIR, to the same tensors and tables as if nothing had happened.
Overrides may change where it runs and how it is kept, for example
  python -m rayfed.resume runs/mine rounds=+20 cluster.actors=4
"""


def continued(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The config with which a run goes on.

    Args:
        path: Folder of the run.
        overrides: `key=value`; `rounds=+N` adds rounds.

    Raises:
        ConfigError: There is no run, or a key would change its result; names the key.
    """
    from rayfed.config.schema import load_run, to_dict

    before = load_run(path)
    more = [text for text in overrides if text.startswith("rounds=")]
    config = load_run(path, [text for text in overrides if text not in more])
    for key, old, new in changes(to_dict(before), to_dict(config)):
        raise ConfigError(
            f"{key}: {new!r} would change the result of {path}, which began with {old!r}; start a new "
            f"run, or change only {', '.join(HARMLESS)} and rounds"
        )
    rounds = before.rounds if not more else _rounds(more[-1].removeprefix("rounds="), before.rounds)
    return replace(config, rounds=rounds, output=str(path), overwrite=False)


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


def main(argv: Sequence[str] | None = None) -> int:
    """Continue from the command line. Exit code: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    parser = parser_of("rayfed.resume", USAGE)
    parser.add_argument("run", type=user_folder, help="folder of the run")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--quiet", action="store_true", help="show nothing but errors")
    parser.add_argument("--json", action="store_true", help="one JSON object a round on standard output")
    args = parser.parse_args(argv)

    def work() -> None:
        from rayfed.experiment.simulate import execute
        from rayfed.record.claim import claim_again

        with claim_again(args.run) as claim:
            execute(continued(args.run, args.overrides), args.quiet, as_json=args.json, claim=claim)

    return guarded(work, args.debug, "finished rounds are kept")


if __name__ == "__main__":
    sys.exit(supervised(main))
