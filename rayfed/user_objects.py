"""Objects of a user in place of names in a config: their names, and what is recorded of them.

A config holds plain values only. An object that can be imported is named `package.module:NAME`; any other one
gets a name with a digest of its source or of its values, under which this process knows it until it ends.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

from rayfed.errors import shown

DIGITS = 8
"""Hexadecimal digits of a digest in a name."""

OWN = re.compile(rf"[A-Za-z_]\w*-[0-9a-f]{{{DIGITS}}}")
"""Names of objects that cannot be imported."""


@dataclass(frozen=True)
class Known:
    """An object that this process knows by a name.

    Attributes:
        value: What the registries find.
        text: Its `repr`, cut where it is long.
        digest: SHA-256 hex digest of its source or of its values.
        place: File and line where it was defined, as ` (own.py, line 3)`; empty: not known.
    """

    value: Any
    text: str
    digest: str
    place: str = ""


_KNOWN: dict[str, Known] = {}

SOURCES = threading.Lock()
"""Held while sources are read: Python 3.11 fails where two threads parse at once."""


def is_own(name: object) -> bool:
    """Whether a value of the config is the name of an object that cannot be imported."""
    return isinstance(name, str) and bool(OWN.fullmatch(name))


def why_other_values(key: str) -> str:
    """Advice about an object that is not the one of before, in parentheses: why a network may be another."""
    if key != "model.name":
        return ""
    return (
        " (a network that is made anew has other start values: hand over what makes it, model=Net, or call "
        "torch.manual_seed before)"
    )


def title(name: str) -> str:
    """A name as tables and figures show it: of an object that cannot be imported without its digest."""
    return name.rpartition("-")[0] if is_own(name) else name


def find(name: object) -> Known | None:
    """The object that has a name of `register`; None: this process knows none, or a config has no text."""
    return _KNOWN.get(name) if isinstance(name, str) else None


def known_in(tree: Any) -> dict[str, Known]:
    """The objects that this process knows by the texts in plain containers, such as those of a config."""
    if isinstance(tree, str):
        known = find(tree)
        return {} if known is None else {tree: known}
    every = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return {name: known for each in every for name, known in known_in(each).items()}


def remember(objects: Mapping[str, Known]) -> None:
    """Know the objects that another process knows, by the names that they have there (`known_in`)."""
    _KNOWN.update(objects)


def register(value: Any, source: Any = None, digest: str = "", label: str = "") -> str:
    """Name an object, so that a config can hold it.

    Args:
        value: What the registries find under the name.
        source: The class or function that it was made from; None: `value` itself.
        digest: Digest of its values; empty: that of the source.
        label: Begins the name of an object that cannot be imported; empty: the name of the source.

    Returns:
        `package.module:NAME`, if `value` is the source and can be imported, else a name with a digest.
    """
    code = value if source is None else source
    digest = digest or source_digest(code)
    path = import_path(code) if source is None else ""
    kind = label or getattr(code, "__name__", "") or type(code).__name__
    name = (
        path or f"{re.sub(r'[^A-Za-z0-9_]+', '_', kind).lstrip('0123456789') or 'object'}-{digest[:DIGITS]}"
    )
    _KNOWN[name] = Known(value, shown(value), digest, place(code))
    return name


def import_path(value: Any) -> str:
    """`package.module:NAME` of a class, function or module constant; empty: another process has none."""
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    found = sys.modules.get(module or "")
    if module == "__main__" or found is None or not getattr(found, "__file__", None):
        return ""
    return f"{module}:{name}" if name.isidentifier() and getattr(found, name, None) is value else ""


def import_or_none(name: str) -> Any:
    """The object that `package.module:NAME` names; None where it cannot be imported."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except Exception:  # a module of a user may raise anything; the registries say what
        return None


def source_digest(value: Any) -> str:
    """SHA-256 hex digest of the source of a class or function, of its bytecode where there is no source."""
    try:
        with SOURCES:
            text = inspect.getsource(
                value if isinstance(value, ModuleType) or callable(value) else type(value)
            )
        return hashlib.sha256(inspect.cleandoc(text).encode()).hexdigest()
    except (OSError, TypeError, IndexError):
        out = hashlib.sha256()
        for name, code in sorted(_codes(value).items()):
            out.update(repr((name, code.co_code, code.co_names, _constants(code))).encode())
        return out.hexdigest()


def text_digest(text: str) -> str:
    """SHA-256 hex digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _codes(value: Any) -> dict[str, CodeType]:
    """The code objects of a function or of the methods of a class, by name."""
    members = vars(value) if isinstance(value, type) else {getattr(value, "__name__", ""): value}
    functions = {name: inspect.unwrap(each) for name, each in members.items() if callable(each)}
    return {name: each.__code__ for name, each in functions.items() if hasattr(each, "__code__")}


def _constants(code: CodeType) -> list[Any]:
    """Constants of a code object, those of the functions in it included."""
    return [
        (each.co_code, _constants(each)) if isinstance(each, CodeType) else each for each in code.co_consts
    ]


def place(value: Any) -> str:
    """File and line where a class or function was defined, as ` (own.py, line 3)`; empty: not known."""
    kind: Callable[..., Any] | type = (
        value if callable(value) and hasattr(value, "__module__") else type(value)
    )
    try:
        with SOURCES:
            file = inspect.getsourcefile(kind) or "<cell>"
            line = inspect.getsourcelines(kind)[1]
    except (OSError, TypeError, IndexError):
        return ""
    return f" ({'a cell' if file.startswith('<') else file.rpartition('/')[2]}, line {max(line, 1)})"


def records(names: dict[str, object]) -> dict[str, dict[str, str]]:
    """Describe the objects in a config, by key: their name, `repr` and digest.

    Args:
        names: Values of the config by key; names of what is part of RayFed are left out.
    """
    records_by_name: dict[str, dict[str, str]] = {}
    for key, name in names.items():
        known = find(name) if isinstance(name, str) else None
        if known is None and isinstance(name, str) and ":" in name:
            value = import_or_none(name)
            known = None if value is None else Known(value, shown(value), source_digest(value))
        if known is not None and isinstance(name, str) and not name.startswith(("rayfed.", "algorithms.")):
            records_by_name[key] = {"name": name, "repr": known.text, "digest": known.digest}
    return records_by_name
