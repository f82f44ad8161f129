"""Errors a user can act on. All of them survive pickling, because Ray sends them between processes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class RayFedError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(RayFedError):
    """Bad input: a config value, a folder, a file. Found before any actor starts; exit code 2."""


class DataError(ConfigError):
    """A data set on disk is not what the config says, or cannot be read."""


class ResourceError(ConfigError):
    """The cluster cannot hold what the config asks for."""


class NobodyAnsweredError(RayFedError):
    """No client that was called in an exchange answered; the round then changes nothing."""


class ClientError(RayFedError):
    """A client call failed; the message says which client, round and task.

    Attributes:
        kind: What the event of this failure is called.
    """

    kind: ClassVar[str] = "error"

    def __init__(self, client: str, round: int, task: str, cause: str, trace: str = "") -> None:
        super().__init__(client, round, task, cause, trace)
        self.client, self.round, self.task, self.cause, self.trace = client, round, task, cause, trace

    def __str__(self) -> str:
        return (
            f"client {self.client!r} failed in round {self.round} while running {self.task!r}: {self.cause}"
        )


class NonFiniteClientError(ClientError):
    """What a client trained or measured holds NaN or infinity."""

    kind: ClassVar[str] = "nonfinite"


class NonFiniteError(RayFedError):
    """A loss or a global tensor is NaN or infinite, and on_nonfinite=raise; exit code 1."""


class ServerError(RayFedError):
    """The arithmetic of a method's server failed; the message says the round, the error and the keys."""


class ClusterError(RayFedError):
    """The cluster failed: the driver's process or all client actors are gone."""


class StorageError(RayFedError):
    """Something could not be written; what had been written before is untouched."""


class LostStoreError(RayFedError):
    """The private store of a client was lost with its node; the last checkpoint has it."""

    def __init__(self, client: str) -> None:
        super().__init__(client)
        self.client = client

    def __str__(self) -> str:
        return f"the store of client {self.client!r} was lost with its node"


class StoppedError(RayFedError):
    """The run was asked to end."""


def one_line(error: BaseException) -> str:
    r"""An error's message without line breaks and control characters, which a file name may hold.

    >>> one_line(ValueError("two\nlines and \x1b[31mred"))
    'two lines and \\x1b[31mred'
    """
    text = " ".join(str(error).split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


MOST_SHOWN = 200
"""Characters of a value that are repeated in a message."""


def shown(value: object) -> str:
    """A value as a message repeats it: `repr`, cut where it is long.

    >>> shown("x" * 1000) == "'" + 149 * "x" + "... (1002 characters)"
    True
    """
    try:
        text = repr(value)
    except ValueError:  # an integer of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= MOST_SHOWN else f"{text[:150]}... ({len(text)} characters)"


def unknown(key: str, value: object, choices: Iterable[str]) -> str:
    """The message for a name that does not exist: what was given, the nearest match, all that is allowed.

    >>> unknown("tuning", "loar", ["full", "lora"])
    "tuning: 'loar' does not exist; did you mean 'lora'? Choose one of: full, lora"
    """
    names = sorted(choices)
    near = difflib.get_close_matches(str(value)[:MOST_SHOWN], names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"{key}: {shown(value)} does not exist{hint} Choose one of: {', '.join(names) or 'nothing'}"


def check_name(key: str, name: object) -> None:
    """Raise ConfigError for what is neither a plain name nor `package.module:NAME`."""
    module, colon, attribute = str(name).partition(":")
    parts = [*module.split("."), attribute] if colon else []
    if not isinstance(name, str) or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{key}: {name!r} is neither a name nor package.module:NAME")
