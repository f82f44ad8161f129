"""Reads which methods `compare` lists, for commands on which nothing else chooses an algorithm."""

from __future__ import annotations

from collections.abc import Sequence

from rayfed.documents import parse_value
from rayfed.errors import ConfigError

CHOOSES = ("algorithm", "experiment")
"""Groups that choose the method of a command."""


def listed(overrides: Sequence[str]) -> tuple[str, ...]:
    """The methods that a command compares where nothing but `compare` names one.

    Args:
        overrides: `group=name` and `key=value`, as on the command line.

    Returns:
        Their names; empty where `algorithm` or `experiment` chooses a method, or nothing is compared.

    Raises:
        ConfigError: Only one method is listed, or one of them twice.
    """
    pairs = [(key.strip(), value.strip()) for key, _, value in (text.partition("=") for text in overrides)]
    texts = [value for key, value in pairs if key == "compare"]
    if not texts or any(key in CHOOSES for key, _ in pairs):
        return ()
    value = parse_value("compare", texts[-1])
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return ()  # the schema refuses it, or nothing is compared
    check_listed_once(value)
    if len(names) == 1:
        raise ConfigError(
            f"compare: {names[0]!r} is the only method, as no algorithm is given; write algorithm=NAME "
            f"compare={names[0]}, or list two or more methods"
        )
    return tuple(names)


def check_listed_once(names: str | Sequence[str]) -> None:
    """Refuse a method that `compare` lists twice, and a list without brackets.

    Raises:
        ConfigError: Names the first one, or says how the list is written.
    """
    found = [names] if isinstance(names, str) else list(names)
    if isinstance(names, str) and "," in names:
        raise ConfigError(f"compare: {names!r} is not a list; write compare=[{names.replace(' ', '')}]")
    if twice := [name for name in found if found.count(name) > 1]:
        raise ConfigError(f"compare: {twice[0]!r} is listed twice; list each method once")
