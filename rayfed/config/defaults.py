"""Puts the YAML files of `configs/` together.

A file may build on others, in its list `defaults`:

    # @package _global_                        the keys are those of the whole config, not of the file's group
    defaults:
      - /experiment/fedgcr/clean@_global_      the values of that file
      - override /tuning: lora                 a choice from another group
      - _self_                                 the values of this file come here; without the line, last

Of two values for one key the later one counts. Of two choices from one group, that of the command line
counts, then that of the file which builds on the other, then that of the later entry of a list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rayfed.documents import read_file
from rayfed.errors import ConfigError, shown

DEFAULTS = "defaults"
SELF = "_self_"
OVERRIDE = "override /"
GLOBAL = "# @package _global_"
ROOT = "config"
"""Name of the file with which every config begins."""

FORMS = "write '_self_', '/GROUP/NAME@_global_' or 'override /GROUP: NAME'"

Content = dict[str, Any]


@dataclass
class Composition:
    """One config while it is put together.

    Attributes:
        folder: Folder of the groups.
        chosen: The choice of the command line from each group; `values` adds those that files make.
        plain: The content of a choice that has no YAML file, in the keys of the whole config.
    """

    folder: Path
    chosen: dict[str, str]
    plain: Callable[[str, str], Content]
    _done: set[str] = field(default_factory=set)
    _open: list[str] = field(default_factory=list)

    def values(self) -> Content:
        """All values, as new nested mappings.

        Raises:
            ConfigError: A file is missing, cannot be read, builds on itself, or has an entry in `defaults`
                that means nothing; a choice is from a group that no file puts in.
        """
        tree: Content = {}
        for part in self._file(ROOT, ""):
            merge(tree, part)
        if unused := sorted(self.chosen.keys() - self._done):
            raise ConfigError(
                f"{unused[0]}={self.chosen[unused[0]]}: no file puts in a choice from {unused[0]!r}; add "
                f"`- {unused[0]}: NAME` to the list {DEFAULTS!r} in configs/{ROOT}.yaml (groups there: "
                f"{', '.join(sorted(self._done))})"
            )
        return tree

    def _file(self, name: str, group: str) -> list[Content]:
        """The values of a file and of those it builds on, in the order in which they count."""
        if name in self._open:
            raise ConfigError(f"configs/{name}.yaml: {DEFAULTS}: the file builds on itself")
        path = self.folder / f"{name}.yaml"
        if not path.is_file():
            raise ConfigError(f"configs/{name}.yaml: there is no such file, and another builds on it")
        own, entries, is_global = _read(path, name, path.stat().st_mtime_ns)
        parts = [own if is_global or not group else {group: own}]
        if name == ROOT and "experiment" in self.chosen:
            entries = [*entries, {"experiment": self.chosen["experiment"]}]
        self._open.append(name)
        for entry in entries:
            if is_override(entry):
                self._override(name, *_pair(name, entry))
        # The last entry first: what it chooses counts in the entries before it.
        found = [parts if entry == SELF else self._entry(name, entry) for entry in reversed(entries)]
        self._open.pop()
        if SELF not in entries:
            found.insert(0, parts)
        return [part for each in reversed(found) for part in each]

    def _override(self, file: str, group: str, choice: str) -> None:
        if group in self._done and group not in self.chosen:
            raise ConfigError(
                f"configs/{file}.yaml: {DEFAULTS}: {group} cannot be chosen here, because it is put in later"
            )
        self.chosen.setdefault(group, choice)

    def _entry(self, file: str, entry: Any) -> list[Content]:
        if is_override(entry):
            return []
        if isinstance(entry, str) and entry.startswith("/"):
            name = entry.removeprefix("/").removesuffix("@_global_")
            return self._file(name, name.partition("/")[0])
        group, default = _pair(file, entry)
        choice = self.chosen.get(group, default)
        self._done.add(group)
        name = f"{group}/{choice}"
        if (self.folder / f"{name}.yaml").is_file():
            return self._file(name, group)
        return [self.plain(group, choice)]


def is_override(entry: Any) -> bool:
    """Whether an entry of `defaults` chooses from another group."""
    return isinstance(entry, dict) and any(str(key).startswith(OVERRIDE) for key in entry)


def merge(tree: Content, other: Mapping[str, Any]) -> None:
    """Put the values of `other` into `tree`; nested mappings are merged, anything else is replaced."""
    for key, value in other.items():
        if isinstance(tree.get(key), dict) and isinstance(value, dict):
            merge(tree[key], value)
        else:
            tree[key] = deepcopy(value)


def _pair(file: str, entry: Any) -> tuple[str, str]:
    """Group and name of the entry `GROUP: NAME`.

    Raises:
        ConfigError: The entry is something else.
    """
    match list(entry.items()) if isinstance(entry, dict) else ():
        case [(str(group), str(choice))]:
            return group.removeprefix(OVERRIDE), choice
    raise ConfigError(f"configs/{file}.yaml: {DEFAULTS}: {shown(entry)} is no entry; {FORMS}")


@cache
def _read(path: Path, name: str, changed: int) -> tuple[Content, list[Any], bool]:
    """The values of a file, its list `defaults`, and whether its keys are those of the whole config.

    Args:
        path: The file.
        name: Its name below `configs/`, for errors.
        changed: When it was written, so that a new text is read.
    """
    content = read_file(path, f"configs/{name}.yaml")
    entries = content.pop(DEFAULTS, [])
    if not isinstance(entries, list):
        raise ConfigError(f"configs/{name}.yaml: {DEFAULTS}: {shown(entries)} is not a list")
    comments = [line.strip() for line in path.read_text("utf-8").splitlines() if line.startswith("#")]
    return content, entries, GLOBAL in comments
