"""Command lines: options may stand anywhere between overrides, and nothing is given twice."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from rayfed.errors import ConfigError, one_line, shown


class Arguments(argparse.ArgumentParser):
    """An argument parser whose error is one line, as every other error of a command is."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {one_line(ValueError(message))}; --help shows what there is\n")

    def parse_args(  # type: ignore[override]  # never into a namespace of the caller
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """The arguments, options and overrides in any order.

        Raises:
            SystemExit: They are not allowed (code 2), or --help was asked for (code 0).
        """
        found = self.parse_intermixed_args(args)
        try:
            refuse_repeated(getattr(found, "overrides", ()))
        except ConfigError as err:
            self.exit(2, f"error: {one_line(err)}\n")
        return found


def refuse_repeated(overrides: Sequence[str]) -> None:
    """Refuse a key that is given two values, or that a later override of its section would undo.

    Raises:
        ConfigError: Names the key and both values.
    """
    given: dict[str, str] = {}
    for text in overrides:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            continue  # whoever reads it says what is wrong with it
        if given.get(key, value) != value:
            raise ConfigError(f"{key}: given twice, as {shown(given[key])} and as {shown(value)}; keep one")
        undone = [name for name in given if name.startswith(f"{key}.") and not _is_group(key, value)]
        if undone:
            raise ConfigError(
                f"{key}: {shown(value)} would undo {undone[0]}={given[undone[0]]}, which stands before it; "
                f"keep one"
            )
        given[key] = value


def _is_group(key: str, value: str) -> bool:
    """Whether an override names a group (`data=pacs`), which is read before all values."""
    return "." not in key and not value.startswith("{")
