"""Errors that a user can act on. All can be pickled, because Ray sends them between processes."""

from __future__ import annotations

import difflib
import os
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

TRY_AGAIN = 75
"""Exit code of a command that may succeed later as it is, EX_TEMPFAIL of sysexits.h."""


class RayFedError(Exception):
    """Base class of all errors that RayFed raises for the user.

    Attributes:
        exit_code: Exit code of a command that ends with it.
    """

    exit_code: ClassVar[int] = 1


class ConfigError(RayFedError):
    """Wrong input: a config value, a folder or a file. Found before any actor starts; exit code 2."""

    exit_code: ClassVar[int] = 2


class UnreachableError(ConfigError):
    """No Ray cluster answers at the address; exit code 75."""

    exit_code: ClassVar[int] = TRY_AGAIN


class DataError(ConfigError):
    """A data set on disk cannot be read or differs from what the config says."""


class ResourceError(ConfigError):
    """The cluster has fewer CPUs, GPUs or less memory than the config asks for."""


class BusyError(ResourceError):
    """The cluster has the resources, but other jobs use them; exit code 75."""

    exit_code: ClassVar[int] = TRY_AGAIN


class NobodyAnsweredError(RayFedError):
    """No client that was called in an exchange answered; the model then stays unchanged in this round."""


class ClientError(RayFedError):
    """A call of a client failed.

    Attributes:
        client: Id of the client.
        round: Round index, from 0; the message counts from 1, as files and the screen do.
        task: Tag of the exchange.
        cause: What failed, in one line.
        trace: Traceback at the client; empty where there is none.
        kind: What the event of this failure is called.
    """

    kind: ClassVar[str] = "error"

    def __init__(self, client: str, round: int, task: str, cause: str, trace: str = "") -> None:
        super().__init__(client, round, task, cause, trace)
        self.client = client
        self.round = round
        self.task = task
        self.cause = cause
        self.trace = trace

    def __str__(self) -> str:
        where = f"in round {self.round + 1} while running {self.task!r}"
        return f"client {self.client!r} failed {where}: {self.cause}"


class NonFiniteClientError(ClientError):
    """A client trained or measured a value that is NaN or infinite."""

    kind: ClassVar[str] = "nonfinite"


class DeviceMemoryError(ClientError):
    """The device of a client has too little memory; the message names what would need less of it."""

    kind: ClassVar[str] = "device_memory"


class DeviceError(ClientError):
    """The device of a client failed, and its process cannot use it any more."""

    kind: ClassVar[str] = "device_failed"


class NonFiniteError(RayFedError):
    """A loss or a global tensor is NaN or infinite, and on_nonfinite=raise; exit code 1."""


class ServerError(RayFedError):
    """The arithmetic of a method's server failed; the message says the round, the error and the keys."""


class ClusterError(RayFedError):
    """The cluster failed: the Ray head or all client actors were lost."""


class StorageError(RayFedError):
    """A file could not be written; files written before are unchanged."""


class LostStoreError(RayFedError):
    """The private store of a client was lost because its node failed; the last checkpoint has a copy."""

    def __init__(self, client: str) -> None:
        super().__init__(client)
        self.client = client

    def __str__(self) -> str:
        return f"the store of client {self.client!r} was lost with its node"


class PartsFailedError(RayFedError):
    """Some methods of a comparison, folds or cells of a job failed; what the others finished is kept."""


class OutputClosedError(RayFedError):
    """The program that read the output, such as `head`, has ended."""


class StoppedError(RayFedError):
    """The run was asked to end, for example by a signal."""


class StoppedEarlyError(StoppedError):
    """A rule of the user ended a run before its last round; its finished rounds are kept."""


def one_line(error: BaseException) -> str:
    r"""The message of an error in one line, with control characters escaped.

    Messages quote names of files, which may contain line breaks and control characters.

    >>> one_line(ValueError("two\nlines and \x1b[31mred"))
    'two lines and \\x1b[31mred'
    """
    return printable(" ".join(str(error).split()))


@contextmanager
def adding(text: str) -> Iterator[None]:
    """Add to the message of wrong input that is found in the block where it is, or what to do.

    Args:
        text: What follows the message; empty: nothing.
    """
    try:
        yield
    except ConfigError as err:
        if err.args and isinstance(err.args[0], str):
            err.args = (f"{err.args[0]}{text}", *err.args[1:])
        raise


def printable(text: str) -> str:
    r"""A text with control and direction characters escaped, which would change what a terminal shows.

    >>> printable("\x1b[31mred\u202e")
    '\\x1b[31mred\\u202e'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def place_of(error: BaseException) -> str:
    """File and line of the code of a method or of the user that raised an error, as ` (own.py, line 3)`.

    Code of RayFed's engine and of libraries is passed over; empty where there is no other. For code that
    cannot be read, the place is that of the mistake.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({Path(error.filename).name}, line {error.lineno})"
    paths = sysconfig.get_paths()
    libraries = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    others = (*(f"{folder}{os.sep}" for folder in (*libraries, Path(__file__).parent)), "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(others):
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""


def cause_of(error: BaseException) -> str:
    """The reason of a failure in one line: the message of an own error, else type, message and place, too.

    >>> cause_of(ClusterError("all actors were lost")), cause_of(KeyError("alpha"))
    ('all actors were lost', "KeyError: 'alpha'")
    """
    text = one_line(error)
    if isinstance(error, RayFedError) and text:
        return text
    return f"{type(error).__name__}{f': {text}' if text else ''}{place_of(error)}"


MOST_SHOWN = 200
"""Characters of a value that are repeated in a message."""


MOST_LISTED = 1000
"""Characters of a list of names in a message; of a longer list only the names near the value are shown."""

MOST_NEAR = 10
"""Names that are shown of a list that is too long."""


def shown(value: object) -> str:
    """A value as a message repeats it: `repr`, cut where it is long.

    >>> shown("x" * 1000) == "'" + 149 * "x" + "... (1002 characters)"
    True
    """
    try:
        text = " ".join(repr(value).split("\n"))
    except ValueError:  # an integer of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= MOST_SHOWN else f"{text[:150]}... ({len(text)} characters)"


def count_of(number: int, noun: str) -> str:
    """A number with its noun, in the singular or the plural.

    >>> count_of(1, "client"), count_of(3, "client"), count_of(2, "class")
    ('1 client', '3 clients', '2 classes')
    """
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{ending}"


def unknown(key: str, value: object, choices: Iterable[str]) -> str:
    """Error message for a name that does not exist: the name, the nearest match, and all allowed names.

    >>> unknown("tuning", "loar", ["full", "lora"])
    "tuning: 'loar' does not exist; did you mean 'lora'? Choose one of: full, lora"
    >>> unknown("data", "PACS", ["pacs", "vlcs"])
    "data: 'PACS' does not exist; did you mean 'pacs'? Choose one of: pacs, vlcs"
    >>> unknown("data.classes", "catt", ["cat", "bat", *(f"class {i}" for i in range(200))])
    "data.classes: 'catt' does not exist; did you mean 'cat'? Choose one of: cat, bat and 200 more"
    """
    names = sorted(choices)
    by_lower_case = {name.lower(): name for name in names}
    near = difflib.get_close_matches(str(value)[:MOST_SHOWN].lower(), by_lower_case, n=MOST_NEAR, cutoff=0.5)
    is_near = bool(difflib.get_close_matches(str(value)[:MOST_SHOWN].lower(), near, n=1))
    hint = f"; did you mean {by_lower_case[near[0]]!r}?" if is_near else "."
    listed = ", ".join(names) or "nothing"
    if len(listed) > MOST_LISTED:
        first = [by_lower_case[name] for name in near] or names[:MOST_NEAR]
        listed = f"{', '.join(first)} and {len(names) - len(first)} more"
    return f"{key}: {shown(value)} does not exist{hint} Choose one of: {listed}"


def check_name(key: str, name: object) -> None:
    """Check that `name` is a plain identifier or has the form `package.module:NAME`.

    Raises:
        ConfigError: It is neither.
    """
    module, colon, attribute = str(name).partition(":")
    parts = [*module.split("."), attribute] if colon else []
    if not isinstance(name, str) or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{key}: {name!r} is neither a name nor package.module:NAME")
