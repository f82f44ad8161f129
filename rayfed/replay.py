"""The command python -m rayfed.replay: executes one call of a client of a run again, to the bit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfed.errors import ConfigError
from rayfed.terminal.arguments import parser_of
from rayfed.terminal.console import say
from rayfed.terminal.exit_code import run_guarded
from rayfed.user_files import to_json, user_folder

if TYPE_CHECKING:
    from rayfed.experiment.replayed_call import Replay
    from rayfed.terminal.table_formats import Table

USAGE = """\
python -m rayfed.replay DIR --round N --client ID [--exchange NAME] [--pdb]
    [--set KEY=VALUE] [--save FILE] [--json] [--debug]

Executes one call of the run in DIR again in this process: a client in a
round, with its loss per step. The run may be finished, have failed, or go on.
For example
  python -m rayfed.replay runs/mine --round 3 --client c04 --set train.lr=0.01
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Replay from the command line. Exit code: 0 done, 1 it failed, 2 bad input, 130 interrupted."""
    parser = parser_of("rayfed.replay", USAGE)
    parser.add_argument("run", type=user_folder, help="folder of the run")
    parser.add_argument("--round", type=int, required=True, metavar="N", help="number of the round, from 1")
    parser.add_argument("--client", required=True, metavar="ID", help="its id, such as c04-photo, or c04")
    parser.add_argument("--exchange", default="fit", metavar="NAME", help="default: fit, the training")
    parser.add_argument("--pdb", action="store_true", help="execute the client in Python's debugger")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key of local or train for this call",
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the answer's tensors as safetensors")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args(argv)

    def work() -> None:
        from rayfed.experiment.replayed_call import replay
        from rayfed.terminal.console import teller
        from rayfed.terminal.table_formats import terminal_width
        from rayfed.user_files import check_run_folder

        check_run_folder(args.run)
        changes = dict(_pair(text) for text in args.set)
        about = {"exchange": args.exchange, "changes": changes, "debug": args.pdb}
        done = replay(args.run, args.round, args.client, **about, tell=teller(as_json=args.json))
        if args.save is not None:
            _save(done, args.save)
        if args.json:
            say(to_json(in_words(done)))
        else:
            say(table(done).text(terminal_width()))

    return run_guarded(work, args.debug)


def _pair(text: str) -> tuple[str, Any]:
    """Key and value of a change.

    Raises:
        ConfigError: It is no KEY=VALUE.
    """
    import yaml

    key, found, value = text.partition("=")
    if not found:
        raise ConfigError(f"set: {text!r} is no KEY=VALUE, such as local.mu=0.2")
    return key, yaml.safe_load(value)


def _save(done: Replay, file: Path) -> None:
    from safetensors.torch import save

    from rayfed.record.atomic_files import write_bytes

    write_bytes(file, save({name: value.contiguous() for name, value in done.update.params.items()}))


def in_words(done: Replay) -> dict[str, Any]:
    """A call as plain values: who, when, the loss of each step, the metrics, the digest of the tensors."""
    from rayfed.federation.params import digest

    return {
        "client": done.client,
        "round": done.round,
        "exchange": done.exchange,
        "changes": dict(done.changes),
        "steps": done.steps.to_dict("records"),
        "metrics": dict(done.update.metrics),
        "as_recorded": done.is_as_recorded,
        "change_norm": change_norm(done),
        "sha256": digest(done.update.params),
    }


def change_norm(done: Replay) -> float:
    """The L2 norm of the difference between what the client sent and what it had received."""
    sent = done.sent.params
    parts = (value - sent[name] for name, value in done.update.params.items() if name in sent)
    return float(sum(float(part.double().square().sum()) for part in parts) ** 0.5)


MOST_ROWS = 8
"""Rows of a batch that are shown."""


def table(done: Replay) -> Table:
    """The steps of a call, and what is known of its answer as notes."""
    from rayfed.federation.params import digest
    from rayfed.terminal.table_formats import Column, Table

    rows = [
        [number, f"{step['loss']:.6g}", step["split"], _few(step["rows"])]
        for number, step in enumerate(done.steps.to_dict("records"), 1)
    ]
    title = f"{done.client} in round {done.round}, exchange {done.exchange}"
    if done.changes:
        title += f", with {', '.join(f'{key}={value}' for key, value in done.changes.items())}"
    notes = [
        f"answer: {len(done.update.params)} tensors, change of norm {change_norm(done):.6g}, sha256 "
        f"{digest(done.update.params)[:16]}"
    ]
    if done.update.metrics:
        notes.append(", ".join(f"{name} {value:.6g}" for name, value in done.update.metrics.items()))
    same = done.is_as_recorded
    if same is not None:
        what = f"round {done.other_round}, which was run again," if done.other_round else "it"
        notes.append("it is as the run recorded it" if same else f"{what} {OTHERWISE}")
    if not done.alone:
        notes.append(
            "the answer is that of the group (train.group), the losses are those of the client alone"
        )
    columns = [Column("step", "count"), Column("loss"), Column("split"), Column("examples (index)")]
    return Table(title, columns, rows, tuple(notes))


OTHERWISE = (
    "is NOT as the run recorded it: that had another processor, GPU or version (environment.json), or files "
    "of it were changed"
)


def _few(rows: Sequence[int]) -> str:
    more = f" and {len(rows) - MOST_ROWS} more" if len(rows) > MOST_ROWS else ""
    return ", ".join(map(str, rows[:MOST_ROWS])) + more


if __name__ == "__main__":
    sys.exit(main())
