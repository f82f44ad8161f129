"""Lists all algorithms, tuning schemes, models, data sets, rules and others, one line each.

Descriptions are the first lines of the files: of the docstring of a Python file, of the comment at the top of
a YAML file. Nothing is imported for them, so that listing is fast.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rayfed.config import papers
from rayfed.config.compose import BRINGS, NAMED, choices, config_groups, folder
from rayfed.errors import ConfigError, unknown
from rayfed.registry import EXECUTOR_FILES, SAMPLING_FILES, TRACKER_FILES
from rayfed.terminal.arguments import parser_of
from rayfed.terminal.console import say
from rayfed.terminal.exit_code import run_guarded
from rayfed.terminal.table_formats import fit_width, terminal_width
from rayfed.user_files import read_file

USAGE = """\
rayfed list [SECTION] [--json] [--debug]

Lists every algorithm, tuning scheme, model, data set, experiment and sweep,
and in brackets what each one brings: data=shakespeare brings model=char_lstm;
then the rules that draw the clients of a round, executors and trackers.
SECTION is algorithms, tunings, models, data, experiments, sweeps, rules,
executors or trackers; without it all are listed. For example
  rayfed list tunings
  rayfed list --json
"""

SECTIONS = {
    "algorithms": "algorithm",
    "tunings": "tuning",
    "models": "model",
    "data": "data",
    "experiments": "experiment",
    "sweeps": "sweep",
    "rules": "sampling",
    "executors": "cluster.executor",
    "trackers": "trackers",
}
"""Titles of the list, and the config group or key that each one is about."""

VALUES = {
    "sampling": SAMPLING_FILES,
    "cluster.executor": EXECUTOR_FILES,
    "trackers": TRACKER_FILES,
}
"""Files of the values of keys that are no groups."""

OTHER_TITLES = {"methods": "algorithms"} | {group: title for title, group in SECTIONS.items()}
"""Other words for a title: that of the documentation, and the config groups."""

OVERRIDE = re.compile(r"override /(\w+)")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One name of a config group.

    Attributes:
        name: What to write after `group=`.
        description: One line.
        brings: Choices in other groups that come with it, by group.
    """

    name: str
    description: str
    brings: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Description, followed by the choices that come with it in brackets."""
        brings = ", ".join(f"{group}={name}" for group, name in self.brings.items())
        return f"{self.description} [{brings}]" if brings else self.description


def choices_of(group: str) -> list[Choice]:
    """Every choice of a config group, or every value of a key, sorted by name."""
    if group in VALUES:
        files = VALUES[group]
        return [Choice(name=name, description=files.description(name)) for name in files.names()]
    return [_choice(group, name) for name in choices(group)]


def algorithms() -> list[tuple[str, str]]:
    """Name and description of every method and preset that ships."""
    return [(choice.name, choice.description) for choice in choices_of("algorithm")]


def tunings() -> list[tuple[str, str]]:
    """Name and description of every tuning scheme that ships."""
    return [(choice.name, choice.description) for choice in choices_of("tuning")]


def catalog(terminal: int | None = None, section: str | None = None) -> str:
    """The list as text.

    Args:
        terminal: Letters of the longest line; None: no limit.
        section: The only title of `SECTIONS` that is listed; None: all.
    """
    parts = []
    for group in SECTIONS.values() if section is None else [SECTIONS[section]]:
        entries = choices_of(group)
        width = max(len(choice.name) for choice in entries)
        lines = (f"  {choice.name.ljust(width)}  {choice.text}" for choice in entries)
        parts.append("\n".join([f"{group}=", *(fit_width(line, terminal, width + 2) for line in lines)]))
    return "\n\n".join(parts)


def as_json(section: str | None = None) -> dict[str, list[dict[str, Any]]]:
    """The list as one object: for each section a list of objects with name, description and brings.

    Args:
        section: The only title of `SECTIONS` that is listed; None: all.
    """
    titles = SECTIONS if section is None else [section]
    return {title: [asdict(choice) for choice in choices_of(SECTIONS[title])] for title in titles}


def show(as_object: bool, section: str | None = None) -> None:
    """Write the list, or one section of it, to standard output, as text or as JSON.

    Raises:
        ConfigError: There is no such section.
    """
    section = OTHER_TITLES.get(section or "", section)
    if section is not None and section not in SECTIONS:
        raise ConfigError(unknown("section", section, SECTIONS))
    say(json.dumps(as_json(section), indent=1) if as_object else catalog(terminal_width(), section))


def main(argv: Sequence[str] | None = None) -> int:
    """List from the command line. Exit code: 0 listed, 2 bad input."""
    parser = parser_of("rayfed.config.catalog", USAGE)
    parser.add_argument("section", nargs="?", metavar="SECTION", help="what to list; all if left out")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    return run_guarded(lambda: show(args.json, args.section), args.debug)


def _choice(group: str, name: str) -> Choice:
    if group == "experiment" and (table := papers.find(folder(), name)) and name.endswith(f"/{papers.MINI}"):
        base = _choice(group, table.name)
        small = {key: value for key, value in table.small.items() if key in config_groups()}
        return Choice(name=name, description=f"{base.description}; small", brings={**base.brings, **small})
    file = folder() / group / f"{name}.yaml"
    content = read_file(file, group) if file.is_file() else {}
    text = _comment(file) if file.is_file() else ""
    if group in NAMED and name in NAMED[group].names():
        text = NAMED[group].description(name) if group != "data" or not text else text
    return Choice(name=name, description=text, brings=_brings(content))


def _comment(file: Path) -> str:
    """The first line of comment at the top of a YAML file, without the final full stop."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            return line.removeprefix("#").strip().rstrip(".")
    return ""


def _brings(content: dict[str, Any]) -> dict[str, str]:
    """The choices in other groups, from the section `brings` or the overrides of a defaults list."""
    brought = dict(content.get(BRINGS, {}))
    for entry in content.get("defaults", ()):
        if isinstance(entry, str) and entry != "_self_":  # another experiment that this one begins with
            base = entry.removeprefix("/experiment/").partition("@")[0]
            brought |= _brings(read_file(folder() / "experiment" / f"{base}.yaml", "experiment"))
        for key, name in entry.items() if isinstance(entry, dict) else ():
            if match := OVERRIDE.fullmatch(key):
                brought[match[1]] = name
    return brought


if __name__ == "__main__":
    sys.exit(main())
