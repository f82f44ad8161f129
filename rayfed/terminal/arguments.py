"""Parses the command lines of all commands.

Options may stand anywhere between overrides, and no key may be given twice.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from rayfed.errors import ConfigError, one_line, shown

EXIT_CODES = """
Exit code: 0 finished, 1 failed, 2 bad input, 130 interrupted, 75 the cluster is
busy or does not answer: try again later.
"""
"""Last line of `--help` of a command whose usage says nothing about its codes."""

_command = ""
_names: Mapping[str, str] = {}


def command_line() -> str:
    """The command that is being run, as it can be typed again; empty in calls from Python."""
    return _command


def forget_command() -> None:
    """Forget the command when it has ended, because its process may go on."""
    global _command
    _command = ""


@contextmanager
def called_as(names: Mapping[str, str]) -> Iterator[None]:
    """While the block runs, `--help` names commands as the user calls them.

    Args:
        names: Such as `rayfed run`, by the module that `python -m` would run.
    """
    global _names
    _names = names
    try:
        yield
    finally:
        _names = {}


def _as_called(usage: str) -> str:
    return re.sub(r"python -m ([\w.]*\w)", lambda match: _names.get(match[1], match[0]), usage)


class Arguments(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, like all other errors of a command.

    Args:
        command: Module of the command, such as `rayfed.run`.
        usage: Beginning of the output of `--help`, with commands written as `python -m MODULE`.
    """

    def __init__(self, command: str, usage: str = "") -> None:
        super().__init__(command, usage=_as_called(usage) or None)

    def error(self, message: str) -> NoReturn:
        missing = message.removeprefix("the following arguments are required: ")
        if missing != message:
            message = f"{missing}: missing; write {self._form()}"
        self.exit(2, f"error: {one_line(ValueError(message))}; --help lists the arguments\n")

    def _form(self) -> str:
        """The first form of the usage, in one line."""
        first, *more = (self.usage or self.prog).splitlines()
        further = itertools.takewhile(lambda line: line.startswith(" "), more)
        return " ".join([first, *map(str.strip, further)])

    def _refusal(self, text: str) -> str:
        """The message for an option that does not exist; the name of a config key may be meant."""
        name, equals, value = text.partition("=")
        if not text.startswith("-"):
            return f"{text}: one argument too many; write {self._form()}"
        if near := difflib.get_close_matches(name, self._option_string_actions, n=1, cutoff=0.7):
            advice = f"did you mean {near[0]}?"
        elif name.startswith("--") and any(action.dest == "overrides" for action in self._actions):
            advice = f"a config key has no dashes: write {name[2:]}={value if equals else 'VALUE'}"
        else:
            advice = "--help lists the arguments"
        return f"{text}: there is no such option; {advice}"

    def parse_args(  # type: ignore[override]  # never into a namespace of the caller
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """The arguments, options and overrides in any order.

        Raises:
            SystemExit: They are not allowed (code 2), or --help was asked for (code 0).
        """
        global _command
        parsed, unknown = self.parse_known_intermixed_args(args)
        if unknown:
            self.exit(2, f"error: {one_line(ValueError(self._refusal(unknown[0])))}\n")
        _command = shlex.join(["python", "-m", self.prog, *(sys.argv[1:] if args is None else args)])
        try:
            refuse_repeated(getattr(parsed, "overrides", ()))
        except ConfigError as err:
            self.exit(2, f"error: {one_line(err)}\n")
        return parsed


def refuse_repeated(overrides: Sequence[str]) -> None:
    """Refuse a key that is given two values, or is replaced by a later override of its section.

    Raises:
        ConfigError: Names the key and both values.
    """
    given: dict[str, str] = {}
    for text in overrides:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            continue  # `compose` reports it
        if given.get(key, value) != value:
            raise ConfigError(f"{key}: given twice, as {shown(given[key])} and as {shown(value)}; keep one")
        undone = [name for name in given if name.startswith(f"{key}.") and not _is_group(key, value)]
        if undone:
            raise ConfigError(
                f"{key}: {shown(value)} would replace {undone[0]}={given[undone[0]]}, which is given before "
                f"it; keep one"
            )
        given[key] = value


def _is_group(key: str, value: str) -> bool:
    """Whether an override chooses from a group (`data=pacs`); groups are composed before all values."""
    return "." not in key and not value.startswith("{")


def parser_of(command: str, usage: str) -> Arguments:
    """An argument parser with the options that every command has.

    Args:
        command: Module of the command, such as `rayfed.run`.
        usage: Beginning of the output of `--help`: usage, description and an example.
    """
    parser = Arguments(command, usage=usage if "Exit code" in usage else usage + EXIT_CODES)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser
