"""Parses command lines, turns errors of a command into one line and an exit code, and handles signals.

Options may stand anywhere between overrides, and no key may be given twice.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import logging
import os
import re
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, TextIO

from rayfed.errors import ClientError, ConfigError, OutputClosedError, RayFedError, one_line, shown
from rayfed.terminal.console import say
from rayfed.terminal.stages import erase

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
    return re.sub(r"python -m ([\w.]*\w)", lambda found: _names.get(found[1], found[0]), usage)


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

    def _refused(self, text: str) -> str:
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
        found, unknown = self.parse_known_intermixed_args(args)
        if unknown:
            self.exit(2, f"error: {one_line(ValueError(self._refused(unknown[0])))}\n")
        _command = shlex.join(["python", "-m", self.prog, *(sys.argv[1:] if args is None else args)])
        try:
            refuse_repeated(getattr(found, "overrides", ()))
        except ConfigError as err:
            self.exit(2, f"error: {one_line(err)}\n")
        return found


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


CLOSED = 141  # exit code of a command that a closed pipe ends, as of other programs
STOP = threading.Event()
"""Set when SIGINT or SIGTERM was received."""


OURS = ("rayfed", "tune", "algorithms")
"""Packages whose messages are shown without the name of the package."""


class _Log(logging.StreamHandler[TextIO]):
    """Writes messages to standard error, after the text of the stage was removed from the screen."""

    def format(self, record: logging.LogRecord) -> str:
        package = record.name.partition(".")[0]
        source = "" if package in OURS else f" from {package}"
        return f"{record.levelname.lower()}{source}: {super().format(record)}"

    def emit(self, record: logging.LogRecord) -> None:
        erase()
        super().emit(record)


def parser_of(command: str, usage: str) -> Arguments:
    """An argument parser with the options that every command has.

    Args:
        command: Module of the command, such as `rayfed.run`.
        usage: Beginning of the output of `--help`: usage, description and an example.
    """
    parser = Arguments(command, usage=usage)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


@dataclass
class Ending:
    """The end of a command.

    Attributes:
        code: Its exit code.
    """

    code: int = 0


@contextmanager
def ending(debug: bool = False, interrupted: str = "nothing was changed") -> Iterator[Ending]:
    """While the block runs, errors and signals end it with one line on standard error and an exit code.

    Args:
        debug: Also show the traceback of a RayFedError.
        interrupted: Text that is shown if Ctrl-C or SIGTERM ends the command and the exception has no notes.

    Yields:
        The end, whose exit code is set after the block: 1 for a failure, 2 for bad input, 130 after an
        interruption, 141 if nobody reads the output any more. In these cases one line gives the reason; in
        the last one only if a run ended with it.
    """
    end = Ending()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_Log()])
    # Threads of OpenMP that wait in a loop slow each other down when processes share cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        with stoppable():
            yield end
    except OutputClosedError as err:
        if notes := getattr(err, "__notes__", ()):  # a run has ended with it
            say("; ".join([f"error: {one_line(err)}", *notes]), sys.stderr)
        end.code = CLOSED
    except RayFedError as err:
        trace = err.trace if isinstance(err, ClientError) else ""
        if debug:
            traceback.print_exc()
            if trace:
                say(trace, sys.stderr)
        elif trace:
            err.add_note("--debug shows the traceback")
        say("; ".join([f"error: {one_line(err)}", *getattr(err, "__notes__", ())]), sys.stderr)
        end.code = 2 if isinstance(err, ConfigError) else 1
    except KeyboardInterrupt as err:
        say("; ".join(["interrupted", *(getattr(err, "__notes__", ()) or [interrupted])]), sys.stderr)
        end.code = 130
    finally:
        forget_command()


def guarded(
    work: Callable[[], int | None], debug: bool = False, interrupted: str = "nothing was changed"
) -> int:
    """Run the work of a command in `ending`, and return its exit code.

    Args:
        work: Does the work; returns the exit code, or None for 0.
        debug: As of `ending`.
        interrupted: As of `ending`.
    """
    with ending(debug, interrupted) as end:
        end.code = work() or 0
    return end.code


class _Held:
    """Signals that wait.

    Attributes:
        blocks: Blocks of `finishing` that are being run.
        missed: A signal came in one of them.
    """

    blocks = 0
    missed = False


_HELD = _Held()


@contextmanager
def finishing() -> Iterator[None]:
    """Let a signal wait for the end of the block, where a round is recorded; a second one does not wait."""
    _HELD.blocks += 1
    missed = False
    try:
        yield
    finally:
        _HELD.blocks -= 1
        if not _HELD.blocks:
            missed, _HELD.missed = _HELD.missed, False
    if missed:
        raise KeyboardInterrupt


@contextmanager
def stoppable() -> Iterator[None]:
    """While the block runs, SIGTERM and Ctrl-C raise KeyboardInterrupt and set STOP.

    An exception that a signal raises inside Ray's own code may be lost there, so STOP is also checked after
    every round. It is cleared at the end, so that the next run of this process, as in a notebook, is not
    interrupted too.
    """

    def stop(*_: object) -> None:
        STOP.set()
        if _HELD.blocks and not _HELD.missed:
            _HELD.missed = True
            return
        raise KeyboardInterrupt

    STOP.clear()
    _HELD.missed = False
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        STOP.clear()
