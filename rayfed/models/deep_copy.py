"""Deep copies of a user's networks and losses, with the functions that use parts of them.

`copy.deepcopy` leaves functions as they are. So a hook or an activation of a copied network that refers to
`self`, or to a layer, would read and change the network that was copied.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

LIBRARIES = ("builtins", "numpy", "torch", "logging", "threading")
"""Modules whose objects hold no part of a user's network."""


def deep_copy(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A deep copy in which functions use the copy, where those of the original use parts of the original.

    Args:
        value: A network, or any object; of a function all that it holds is copied.
        memo: Copies that are known already, by the identity of what they were made of.
    """
    memo = {} if memo is None else memo
    walked = _walk([value], into_functions=isinstance(value, FunctionType))
    parts = {id(each) for each in walked if not isinstance(each, FunctionType)}
    held = [each for each in _walk([value], into_functions=True) if isinstance(each, FunctionType)]
    used = [each for each in held if any(id(other) in parts for other in _walk([each], into_functions=True))]
    cells: dict[int, CellType] = {}
    made = [_without_values(function, cells) for function in used]
    memo.update({id(function): new for function, new in zip(used, made, strict=True)})
    out = copy.deepcopy(value, memo)

    def own(content: Any) -> Any:
        reached = _walk([content], into_functions=True)
        return copy.deepcopy(content, memo) if any(id(each) in parts for each in reached) else content

    for function, new in zip(used, made, strict=True):
        new.__defaults__ = None if function.__defaults__ is None else tuple(map(own, function.__defaults__))
        new.__kwdefaults__ = {name: own(each) for name, each in (function.__kwdefaults__ or {}).items()}
        for cell in function.__closure__ or ():
            for content in _content(cell):
                cells[id(cell)].cell_contents = own(content)
    return out


def _without_values(function: FunctionType, cells: dict[int, CellType]) -> FunctionType:
    """The same function with own variables, which are still empty.

    Args:
        function: The function.
        cells: New variables by the identity of the old ones, which functions may share; those that are
            missing are added.
    """
    closure = function.__closure__
    if closure is not None:
        closure = tuple(cells.setdefault(id(cell), CellType()) for cell in closure)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, None, closure)
    made.__dict__.update(vars(function))
    for name in ("__qualname__", "__module__", "__doc__"):
        setattr(made, name, getattr(function, name))
    return made


def _content(cell: CellType) -> list[Any]:
    """The content of a variable of a function; empty: it has none yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _walk(roots: list[Any], into_functions: bool) -> Iterator[Any]:
    """All that objects are and hold, each once, but what cannot change. Args: into_functions: Follow them."""
    todo, seen = list(roots), set[int]()
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, NOTHING):
            continue
        seen.add(id(each))
        yield each
        if into_functions or not isinstance(each, FunctionType):
            todo += _within(each)


NOTHING = (type, type(None), str, bytes, int, float, complex)
"""Types of values that hold nothing."""


def _within(value: Any) -> Iterator[Any]:
    """The direct parts of an object: its attributes, its items, or the variables of a function."""
    if isinstance(value, FunctionType):
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        for cell in value.__closure__ or ():
            yield from _content(cell)
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set):
        yield from value
    elif isinstance(value, nn.Module) or not (isinstance(value, Tensor) or _is_of_library(value)):
        yield from getattr(value, "__dict__", {}).values()


def _is_of_library(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in LIBRARIES
