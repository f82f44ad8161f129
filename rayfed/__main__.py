"""The command rayfed VERB: runs any other command by its name; `rayfed run` is `python -m rayfed.run`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from rayfed import __version__
from rayfed.errors import unknown
from rayfed.terminal.arguments import called_as
from rayfed.terminal.console import say
from rayfed.terminal.supervisor import run_supervised

VERBS = {
    "run": ("rayfed.run", "run one experiment"),
    "resume": ("rayfed.resume", "continue a run that was interrupted, or add rounds to a finished one"),
    "view": ("rayfed.view", "show the rounds of a run, finished or still running"),
    "replay": ("rayfed.replay", "execute one call of a client again, to the bit"),
    "ps": ("rayfed.ps", "list runs and studies, and how far each of them is"),
    "report": ("rayfed.report.__main__", "write one HTML page about runs, which opens without a network"),
    "doctor": (
        "rayfed.doctor",
        "say whether an experiment fits this machine and how long it may take",
    ),
    "prepare": ("rayfed.prepare.__main__", "check a downloaded data set and decode it into the cache"),
    "reproduce": (
        "rayfed.reproduce.__main__",
        "run a paper's table, and compare ours with the paper's numbers",
    ),
    "study": ("rayfed.study", "run a grid of methods, values and seeds that a file describes"),
    "sweep": ("tune.run", "search hyperparameters"),
    "list": ("rayfed.config.catalog", "list every method, tuning, model, data set, experiment and sweep"),
}
"""The module whose `main` each verb calls, and what it does."""

SUPERVISED = ("run", "resume", "reproduce", "study", "sweep")
"""Verbs that start Ray: they run in a child process."""


def usage() -> str:
    """The list of all verbs, one per line."""
    width = max(len(verb) for verb in VERBS)
    lines = (f"  {verb.ljust(width)}  {text}" for verb, (_, text) in VERBS.items())
    return "\n".join(
        [
            "rayfed VERB [arguments]",
            "",
            *lines,
            "",
            "rayfed VERB --help describes each of them; for example",
            "  rayfed run algorithm=fedprox local.mu=0.1 rounds=5",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Call the command of a verb; returns its exit code, or 2 if there is no such verb."""
    verb, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if verb in ("--help", "-h"):
        say(usage())
        return 0
    if verb == "--version":
        say(f"rayfed {__version__}")
        return 0
    if verb not in VERBS:
        say(f"error: {unknown('verb', verb, VERBS)}", sys.stderr)
        return 2
    command: Callable[[Sequence[str]], int] = importlib.import_module(VERBS[verb][0]).main
    names = {module.removesuffix(".__main__"): f"rayfed {verb}" for verb, (module, _) in VERBS.items()}
    with called_as(names):
        if argv is None and verb in SUPERVISED:
            return run_supervised(lambda: command(rest))
        return command(rest)


if __name__ == "__main__":
    sys.exit(main())
