"""Writes rayfed/experiment/sections.py: the keys of each section as types, so that editors complete them.

    python -m docs.generate.sections

`tests/rayfed/experiment/test_sections.py` compares the file with the config.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from rayfed.config.schema import Config

FILE = Path(__file__).parents[2] / "rayfed" / "experiment" / "sections.py"
SECTIONS = ("train", "evaluation", "cluster", "privacy", "faults", "failures", "checkpoint", "partition")
HEAD = '''"""Keys of the sections of a config, as types; written by `python -m docs.generate.sections`."""

from __future__ import annotations

from typing import Literal, TypedDict
'''


def section(name: str) -> type[Any]:
    """The dataclass of a section of the config, or of `data.partition`."""
    hints = typing.get_type_hints(Config)
    found = typing.get_type_hints(hints["data"])[name] if name == "partition" else hints[name]
    assert isinstance(found, type)
    return found


def named(name: str) -> str:
    """Name of the type of a section's dict: `train` gives `TrainKeys`."""
    return f"{name.title()}Keys"


def written(hint: Any) -> str:
    """A type as it is written.

    Raises:
        TypeError: It is neither plain nor made of plain types.
    """
    origin, given = typing.get_origin(hint), typing.get_args(hint)
    if hint is None or hint is type(None):
        return "None"
    if origin is typing.Literal:
        return f"Literal[{', '.join(json.dumps(value) for value in given)}]"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(written(part) for part in given))
    if origin is dict:
        return f"dict[str, {written(given[1]).partition('[')[0].replace('Literal', 'str')}]"
    if origin in (tuple, list):
        return f"{origin.__name__}[{', '.join('...' if part is ... else written(part) for part in given)}]"
    if hint not in (bool, int, float, str):
        raise TypeError(f"{hint} is not a plain type")
    return str(hint.__name__)


def text() -> str:
    """The whole file."""
    return HEAD + "".join(_classes())


def _classes() -> Iterator[str]:
    for name in SECTIONS:
        owner = section(name)
        assert is_dataclass(owner)
        hints = typing.get_type_hints(owner)
        where = "data.partition" if name == "partition" else name
        keys = "\n".join(f"    {field.name}: {written(hints[field.name])}" for field in fields(owner))
        head = f'class {named(name)}(TypedDict, total=False):\n    """Keys of the section `{where}`."""'
        yield f"\n\n{head}\n\n{keys}\n"


if __name__ == "__main__":
    FILE.write_text(text())
