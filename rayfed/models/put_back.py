"""Puts back, before each call of a client, what the call before changed besides the tensors that travel.

A network may hold more than trained tensors: buffers that count, vectors of spectral norm, numbers and lists
in attributes of its modules. If they stayed in the process, one client's data would reach the next client
there, and a result would depend on which process ran whom.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rayfed.models.backbone import Backbone

OF_TORCH = frozenset(vars(nn.Module())) | {"training"}
"""Attributes that every module of torch has: its tensors, its modules, its hooks and its mode."""

NO_STATE = (nn.Module, nn.Parameter, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
"""Types of attributes that are left as they are: what they hold is put back elsewhere, or does not change."""

DEPTH = 6
"""Objects within objects within an attribute are followed so far."""


@dataclass
class _Place:
    """A tensor of the network that does not travel.

    Attributes:
        name: Its name in the state dict of the network.
        held: The dictionary of the module that holds it, by `leaf`.
        leaf: Name of the attribute.
        tensor: The tensor that is held at the start of a call.
        start: A copy of its values; None: it is a frozen parameter, whose memory processes may share.
        version: How often the tensor had been written to when a call began, as torch counts.
        moves: Training was seen to move it, also in ways that torch does not count (`tensor.data`).
    """

    name: str
    held: dict[str, Any]
    leaf: str
    tensor: Tensor
    start: Tensor | None
    version: int
    moves: bool

    def put_back(self) -> None:
        """Give it its start values if something was written to it.

        Raises:
            RuntimeError: It is a frozen parameter, which was not seen to move before the run.
        """
        same = self.held.get(self.leaf) is self.tensor
        if same and not self.moves and self.tensor._version == self.version:
            return
        if self.start is None:
            raise RuntimeError(
                f"the call before changed the frozen weight {self.name!r}, which processes share and which "
                "did not change when the network was examined; register it as a buffer, or train it"
            )
        with torch.no_grad():
            self.tensor.copy_(self.start)
        self.held[self.leaf] = self.tensor
        self.version = self.tensor._version


class PutBack:
    """The values at the start of what a call may change, apart from the tensors that travel.

    A call of this object puts all of it back.
    """

    def __init__(self, model: Backbone) -> None:
        """Remember the present values. Args: model: The tuned model, with its values, on its device."""
        travels = {id(e.held): set[str]() for e in model.tensors().values()}
        for entry in model.tensors().values():
            if entry.is_trained:
                travels[id(entry.held)].add(entry.leaf)
        moves = () if model.behaviour is None else model.behaviour.put_back
        self._places: list[_Place] = []
        for prefix, module in model.named_modules():
            for held in (module._parameters, module._buffers):
                for leaf, tensor in held.items():
                    if tensor is None or leaf in travels.get(id(held), ()):
                        continue
                    if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                        continue  # it is tied to a tensor that travels under another name
                    name = f"{prefix}.{leaf}" if prefix else leaf
                    start = tensor.clone() if held is module._buffers else None
                    own = (tensor, start, tensor._version, name in moves)
                    self._places.append(_Place(name, held, leaf, *own))
        self._attributes = [_Attributes(module) for _, module in modules_with_attributes(model)]

    def __call__(self) -> None:
        """Put everything back.

        Raises:
            RuntimeError: A frozen parameter was changed that was not seen to move before the run.
        """
        for place in self._places:
            place.put_back()
        for attributes in self._attributes:
            attributes.put_back()


def modules_with_attributes(model: Backbone) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a user's network that may keep something in attributes, by name."""
    if not model.is_own:
        return
    for name, module in model.net.named_modules():
        if not type(module).__module__.startswith("rayfed."):
            yield name, module


class _Attributes:
    """The attributes of a module that are neither its tensors nor its modules."""

    def __init__(self, module: nn.Module) -> None:
        self._held = vars(module)
        self._start = {name: value for name, value in self._held.items() if name not in OF_TORCH}
        self._size = len(self._held)
        known = {name: remember(value) for name, value in self._start.items()}
        self._parts = {name: part for name, part in known.items() if part is not None}

    def put_back(self) -> None:
        """Give the attributes their values, and remove those that are new."""
        held = self._held
        for name, value in self._start.items():
            if held.get(name) is not value:
                held[name] = value
        if len(held) > self._size:
            for name in [n for n in held if n not in self._start and n not in OF_TORCH]:
                del held[name]
        for part in self._parts.values():
            part()


def remember(value: Any, depth: int = DEPTH) -> Callable[[], None] | None:
    """A function that puts an object back into its present state, in place; None: it has none that changes.

    Args:
        value: Any object.
        depth: How far objects in it are followed.
    """
    if isinstance(value, NO_STATE) or depth == 0:
        return None
    for kind, of in KINDS.items():
        if isinstance(value, kind):
            return of(value, depth)
    module = type(value).__module__.partition(".")[0]
    if hasattr(value, "__dict__") and module not in ("builtins", "torch", "numpy"):
        return _of_dict(vars(value), depth)
    return None


def _of_tensor(value: Tensor, depth: int) -> Callable[[], None]:
    there = value.detach()  # the same memory
    kept = there.clone()

    def put_back() -> None:
        there.copy_(kept)

    return put_back


def _of_array(value: Any, depth: int) -> Callable[[], None] | None:
    kept = value.copy()

    def put_back() -> None:
        value[...] = kept

    return put_back if value.flags.writeable else None


def _of_list(value: Any, depth: int) -> Callable[[], None]:
    items = list(value)
    parts = [part for item in items if (part := remember(item, depth - 1)) is not None]

    def put_back() -> None:
        if len(value) != len(items) or any(a is not b for a, b in zip(value, items, strict=True)):
            value.clear()
            value.extend(items)
        for part in parts:
            part()

    return put_back


def _of_dict(value: Any, depth: int) -> Callable[[], None]:
    items = dict(value)
    parts = [part for item in items.values() if (part := remember(item, depth - 1)) is not None]

    def put_back() -> None:
        same = value.keys() == items.keys() and all(value[name] is items[name] for name in items)
        if not same:
            value.clear()
            value.update(items)
        for part in parts:
            part()

    return put_back


def _of_set(value: Any, depth: int) -> Callable[[], None]:
    kept = set(value)

    def put_back() -> None:
        value.clear()
        value.update(kept)

    return put_back


def _of_tuple(value: Any, depth: int) -> Callable[[], None] | None:
    parts = [part for item in value if (part := remember(item, depth - 1)) is not None]

    def put_back() -> None:
        for part in parts:
            part()

    return put_back if parts else None


def _of_stream(read: Callable[[Any], Any], write: Callable[[Any, Any], None]) -> Any:
    def of(value: Any, depth: int) -> Callable[[], None]:
        kept = read(value)
        return lambda: write(value, kept)

    return of


def _set_torch(stream: torch.Generator, state: Tensor) -> None:
    stream.set_state(state)


def _set_generator(stream: np.random.Generator, state: Any) -> None:
    stream.bit_generator.state = state


KINDS: dict[type, Callable[[Any, int], Callable[[], None] | None]] = {
    Tensor: _of_tensor,
    np.ndarray: _of_array,
    list: _of_list,
    deque: _of_list,
    dict: _of_dict,
    set: _of_set,
    tuple: _of_tuple,
    torch.Generator: _of_stream(torch.Generator.get_state, _set_torch),
    random.Random: _of_stream(random.Random.getstate, random.Random.setstate),
    np.random.Generator: _of_stream(lambda s: s.bit_generator.state, _set_generator),
    np.random.RandomState: _of_stream(np.random.RandomState.get_state, np.random.RandomState.set_state),
}
"""Types of objects whose state can be put back, with what remembers it."""
