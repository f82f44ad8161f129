"""What there is: every algorithm, tuning scheme, model and data set, from the files themselves."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from rayfed.config.compose import folder
from rayfed.federation.method import METHODS
from rayfed.tuning.base import TUNINGS


def first_line(module: str) -> str:
    """The first line of a module's docstring, without its final dot."""
    doc = importlib.import_module(module).__doc__ or ""
    return doc.strip().splitlines()[0].rstrip(".") if doc.strip() else ""


def algorithms() -> list[tuple[str, str]]:
    """Name and first line of every method that ships."""
    return [(name, first_line(f"{METHODS.package}.{name}")) for name in METHODS.names()]


def tunings() -> list[tuple[str, str]]:
    """Name and first line of every tuning scheme that ships."""
    return [(name, first_line(f"{TUNINGS.package}.{name}")) for name in TUNINGS.names()]


def group(name: str) -> list[str]:
    """Names of the YAML files of a config group, in nested folders too."""
    root = folder() / name
    return sorted(str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.yaml"))


def catalog() -> str:
    """Everything as plain text."""
    parts = [_section("algorithm=", algorithms()), _section("tuning=", tunings())]
    groups = [(name, group(name)) for name in ("model", "data", "experiment", "sweep")]
    return "\n\n".join([*parts, *(f"{name}=  {', '.join(names)}" for name, names in groups if names)])


def markdown(rows: Iterable[tuple[str, str]]) -> str:
    """Names and descriptions as a table."""
    lines = [f"| `{name}` | {text} |" for name, text in rows]
    return "\n".join(["| name | what it is |", "|---|---|", *lines])


def _section(title: str, rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name.ljust(width)}  {text}" for name, text in rows)])
