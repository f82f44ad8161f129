"""The page of every command: the text that its --help prints."""

from __future__ import annotations

import contextlib
import io
from unittest import mock

import rayfed.__main__ as rayfed_command

PAGE = "commands.md"
INTRODUCTION = """# Commands

After this page you can run, watch, continue and report an experiment from the command line. `rayfed VERB` and
`python -m rayfed VERB` are the same; each verb is also a Python module, which takes the same arguments.

An override is `group=name` or `key=value`. `algorithm=fedprox` chooses a method, `local.mu=0.1` sets one of
its [keys](config.md), and [everything that has a name](catalog.md) is what `rayfed list` prints. Write lists
without spaces or in quotation marks: `'compare=[fedavg, afl]'`. zsh needs quotation marks for brackets.

The file of a method, a tuning or a reader is found by its name. `package.module:NAME` is an object of an
installed package, or of a module in the folder where the command is started. A data set can bring choices in
other groups: `data=shakespeare` brings `model=char_lstm`. The command line wins over everything.

Exit codes of all commands: 0 done, 1 failed, 2 bad input, 75 if the cluster is busy or does not answer, 130
interrupted, 141 if the program that read the output has ended. An error is one line on standard error;
`--debug` also shows the traceback."""


def page() -> str:
    """The text of the page."""
    parts = [INTRODUCTION, "", "| verb | module | purpose |", "|---|---|---|"]
    modules = {verb: module.removesuffix(".__main__") for verb, (module, _) in rayfed_command.VERBS.items()}
    parts += [
        f"| [`rayfed {verb}`](#{verb}) | `python -m {modules[verb]}` | {text} |"
        for verb, (_, text) in rayfed_command.VERBS.items()
    ]
    for verb in rayfed_command.VERBS:
        parts += ["", f"## {verb}", "", f"```text\n{help_of(verb)}\n```"]
    return "\n".join([*parts, ""])


def help_of(verb: str) -> str:
    """The text that `rayfed VERB --help` prints, for lines of 100 characters."""
    written = io.StringIO()
    with (
        mock.patch.dict("os.environ", {"COLUMNS": "100", "NO_COLOR": "1"}),
        contextlib.redirect_stdout(written),
        contextlib.suppress(SystemExit),
    ):
        rayfed_command.main([verb, "--help"])
    return written.getvalue().strip()
