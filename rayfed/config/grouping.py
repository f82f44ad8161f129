"""Which methods train their clients one by one, found in their files without importing them."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from rayfed.registry import METHOD_FILES

TUNINGS_ALONE = ("full", "maple", "multimodal_adapter")
"""Tunings with which clients share no pass: most of the model is trained, or layers that both towers use."""


def one_by_one() -> list[str]:
    """Names of the methods whose clients never share their passes (`train.group`).

    They have a `train` or a `step` of their own, and do not say `grouped`; `rayfed.federation.group_size`
    decides the same from their classes.
    """
    return [name for name in METHOD_FILES.names() if _trains_one_by_one(f"{METHOD_FILES.package}.{name}")]


def _trains_one_by_one(module: str) -> bool:
    local = next((k.value for k in _method(module).keywords if k.arg == "local"), None)
    if not isinstance(local, ast.Name):
        return False
    own = {name for part in _classes(module, local.id) for name in _names(part)}
    return bool(own & {"train", "step"}) and "grouped" not in own


def _method(module: str) -> ast.Call:
    """The call that makes METHOD."""
    for node in _parsed(module).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            return node.value
    raise ValueError(f"{module} has no METHOD = Method(...)")


def _classes(module: str, name: str) -> Iterator[ast.ClassDef]:
    """A class and its bases, as far as they are in the package of the methods."""
    for node in _parsed(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield node
            for base in node.bases:
                if isinstance(base, ast.Name):
                    yield from _classes(module, base.id)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith(METHOD_FILES.package):
            yield from (
                c for alias in node.names if alias.name == name for c in _classes(str(node.module), name)
            )


def _names(part: ast.ClassDef) -> Iterator[str]:
    for node in part.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


@cache
def _parsed(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    return ast.parse(Path(str(spec and spec.origin)).read_text(encoding="utf-8"))
