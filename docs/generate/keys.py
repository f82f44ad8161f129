"""The page of every key of the config: its type, its default and its meaning, from the dataclasses."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from docs.generate.methods import attributes
from rayfed.config.schema import Request

PAGE = "config.md"
INTRODUCTION = """# Config keys

After this page you can find every key that `key=value` on the command line or in a YAML file can set.
`python -m rayfed.run --print-config` prints the values that a command would use. The keys of the sections
`server`, `local` and `tuning` are those of the method and of the tuning scheme: see
[methods](methods/index.md) and [tuning schemes](tunings.md)."""
FILE = re.compile(r"docs/(\w+)\.md")
"""A page as docstrings name it."""
MOST = 60  # characters of a type, beyond which it says nothing to a reader
PLAIN = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    type(None): "null",
    Any: "any",
}


def page() -> str:
    """The text of the page."""
    parts = [INTRODUCTION, ""]
    for section, cls in sections(Request):
        about = " ".join((cls.__doc__ or "").partition("\n\n")[0].split())
        title = f"`{section}`" if section else "Top level"
        parts += [
            f"## {title}",
            "",
            about if section else "Keys without a section.",
            "",
            *table(section, cls),
            "",
        ]
    return FILE.sub(r"[\1](\1.md)", "\n".join(parts))


def sections(cls: type[Any], where: str = "") -> Iterator[tuple[str, type[Any]]]:
    """The full name and the dataclass of every section, the outer one first."""
    yield where, cls
    for name, hint in get_type_hints(cls).items():
        for inner in _dataclasses(hint):
            yield from sections(inner, f"{where}.{name}" if where else name)


def table(section: str, cls: type[Any]) -> list[str]:
    """The rows of the keys of a section that are no sections themselves."""
    texts = attributes(cls)
    hints = get_type_hints(cls, include_extras=True)
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            continue
        key = f"{section}.{field.name}" if section else field.name
        words = kind(hints[field.name])
        words = words if len(words) <= MOST or "`, `" in words else "several forms"
        cells = (f"`{key}`", words, default(field), texts.get(field.name, ""))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def default(field: dataclasses.Field[Any]) -> str:
    """The default of a field as it is written in YAML; empty: the config groups set it."""
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    elif field.default is not dataclasses.MISSING:
        value = field.default
    else:
        return ""
    if dataclasses.is_dataclass(value):
        return ""
    return f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    match value:
        case None | True | False:
            return {None: "null", True: "true", False: "false"}[value]
        case tuple() | list():
            return f"[{', '.join(map(_yaml, value))}]"
        case Mapping():
            return "{" + ", ".join(f"{key}: {_yaml(each)}" for key, each in value.items()) + "}"
    return str(value)


def kind(hint: Any) -> str:
    """A type in words.

    >>> kind(Literal["auto"] | Annotated[int, Ge(1)])
    '`auto` or whole number ≥ 1'
    >>> kind(list[str] | None)
    'list of text or null'
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(kind(each) for each in inner))
    if origin is Literal:
        return ", ".join(f"`{_yaml(value)}`" for value in inner)
    if origin is Annotated:
        return " ".join([kind(inner[0]), *filter(None, map(_limit, inner[1:]))])
    if origin in (list, tuple):
        return "list of " + " and ".join(dict.fromkeys(kind(each) for each in inner if each is not Ellipsis))
    if origin is dict:
        return f"mapping to {kind(inner[1])}"
    if dataclasses.is_dataclass(hint):
        return "section"
    return PLAIN.get(hint, getattr(hint, "__name__", str(hint)))


def _limit(limit: Any) -> str:
    match limit:
        case Ge(ge):
            return f"≥ {ge}"
        case Gt(gt):
            return f"> {gt}"
        case Le(le):
            return f"≤ {le}"
        case Lt(lt) if lt != float("inf"):
            return f"< {lt}"
    return ""


def _dataclasses(hint: Any) -> Iterator[type[Any]]:
    """The dataclass that a type is, or those that a union allows."""
    for each in (hint, *(get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ())):
        if isinstance(each, type) and dataclasses.is_dataclass(each):
            yield each
