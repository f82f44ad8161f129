"""Puts back, before each call of a client, what the call before changed besides the tensors that travel.

A network may hold more than trained tensors: buffers that count, vectors of spectral norm, numbers and lists
in attributes of its modules. If they stayed in the process, one client's data would reach the next client
there, and a result would depend on which process ran whom.
"""

from __future__ import annotations

import copy
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rayfed.models.backbone import Backbone
from rayfed.models.named_tensors import global_name

OF_TORCH = frozenset(vars(nn.Module())) | {"training"}
"""Attributes that every module of torch has: its tensors, its modules, its hooks and its mode."""

NO_STATE = (type, FunctionType, BuiltinFunctionType, ModuleType, str, bytes, int, float, complex)
"""Types of attributes that are left as they are: what a network keeps there is refused before the run."""

MOST_COMPARED = 10**6
"""Most numbers in frozen parameters on the CPU that are compared after each call."""


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
        printed: A number that another value would change; None: values are not compared.
    """

    name: str
    held: dict[str, Any]
    leaf: str
    tensor: Tensor
    start: Tensor | None
    version: int
    moves: bool
    printed: int | None

    @property
    def is_changed(self) -> bool:
        """Whether the call so far has changed it, also in ways that torch does not count."""
        if self.held.get(self.leaf) is not self.tensor or self.tensor._version != self.version:
            return True
        return self.printed is not None and print_of(self.tensor) != self.printed

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
        behaviour = model.behaviour
        moves = () if behaviour is None else behaviour.put_back
        frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
        self._places: list[_Place] = []
        self._travel: set[str] = set()  # under another name
        self._watched = behaviour is not None
        known = {id(e.tensor) for e in model.tensors().values() if e.is_trained}
        for prefix, module in model.named_modules():
            for held in (module._parameters, module._buffers):
                for leaf, tensor in held.items():
                    if tensor is None or leaf in travels.get(id(held), ()):
                        continue
                    if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                        continue  # it is tied to a tensor that travels under another name
                    name = f"{prefix}.{leaf}" if prefix else leaf
                    start = tensor.clone() if held is module._buffers else None
                    # On a device each comparison would wait for it; there torch's count of writes must do.
                    here = self._watched and tensor.device.type == "cpu"
                    compares = here and (start is not None or frozen <= MOST_COMPARED)
                    printed = print_of(tensor) if compares else None
                    self._travel |= {name} if id(tensor) in known else set()
                    own = (tensor, start, tensor._version, name in moves, printed)
                    self._places.append(_Place(name, held, leaf, *own))
        modules = list(model.modules())
        self._tensors = [(held, set(held)) for m in modules for held in (m._parameters, m._buffers)]
        seen = {id(part) for part in (*modules, *model.parameters(), *model.buffers())}
        self._attributes = [_Attributes(module, seen) for _, module in modules_with_attributes(model)]

    def __call__(self) -> None:
        """Put everything back.

        Raises:
            RuntimeError: A frozen parameter was changed that was not seen to move before the run.
        """
        for place in self._places:
            place.put_back()
        for attributes in self._attributes:
            attributes.put_back()

    def check(self) -> None:
        """Raise RuntimeError where a call moved or made a tensor, which was not seen before the run."""
        if not self._watched:
            return
        for place in self._places:
            if (
                place.moves
                or place.name in self._travel
                or not place.tensor.is_floating_point()
                or not place.is_changed
            ):
                continue
            kind = "frozen parameter" if place.start is None else "buffer"
            if place.start is not None:
                place.moves = True  # so that the next call, of another client, finds its start values
            raise RuntimeError(
                f"the network changed its {kind} {global_name(place.name)!r} in this call, which it did not "
                "do in the passes before the run, so that it is not averaged; let it move from the first pass"
            )
        for held, names in self._tensors:
            if new := held.keys() - names:
                for name in new:
                    del held[name]
                raise RuntimeError(
                    f"the network made the tensor {min(new)!r} in this call; make it when the network is made"
                )


def print_of(tensor: Tensor) -> int:
    """A number that another value of the tensor would change."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(flat.element_size(), torch.uint8)
    return int(flat.view(whole).sum(dtype=torch.int64)) if flat.numel() else 0


def modules_with_attributes(model: Backbone) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a user's network that may keep something in attributes, by name."""
    if not model.is_own:
        return
    for name, module in model.net.named_modules():
        if not type(module).__module__.startswith("rayfed."):
            yield name, module


class _Attributes:
    """The attributes of a module that are neither its tensors nor its modules."""

    def __init__(self, module: nn.Module, seen: set[int]) -> None:
        """Remember them. Args: module: The module. seen: As of `remember`."""
        self._held = vars(module)
        self._start = {name: value for name, value in self._held.items() if name not in OF_TORCH}
        self._size = len(self._held)
        known = {name: remember(value, seen) for name, value in self._start.items()}
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


def remember(value: Any, seen: set[int] | None = None) -> Callable[[], None] | None:
    """A function that puts an object back into its present state, in place; None: it has none that changes.

    Args:
        value: Any object. What it holds is followed, whatever the depth.
        seen: Objects, by identity, that are put back elsewhere; those that are met are added.
    """
    seen = set() if seen is None else seen
    if value is None or isinstance(value, NO_STATE) or id(value) in seen:
        return None
    seen.add(id(value))
    for kind, of in KINDS.items():
        if isinstance(value, kind):
            return of(value, seen)
    if type(value).__module__.partition(".")[0] == "torch" and not isinstance(value, nn.Module):
        return None
    return None if _is_shared(value) else _of_object(value, seen)


def _is_shared(value: Any) -> bool:
    """Whether copies of an object are the object itself, such as of a logger: it belongs to no network."""
    if isinstance(value, nn.Module):
        return False
    try:
        return copy.copy(value) is value
    except Exception:
        return False


def _of_object(value: Any, seen: set[int]) -> Callable[[], None] | None:
    """Of what has attributes: those in its dictionary, and those in slots."""
    held = getattr(value, "__dict__", None)
    parts = [] if not isinstance(held, dict) else [_of_dict(held, seen)]
    slots = [name for kind in type(value).__mro__ for name in _slots_of(kind) if hasattr(value, name)]
    if slots:
        parts.append(_of_slots(value, slots, seen))
    return _all_of(parts)


def _slots_of(kind: type) -> tuple[str, ...]:
    named = vars(kind).get("__slots__", ())
    names = (named,) if isinstance(named, str) else tuple(named)
    private = f"_{kind.__name__.lstrip('_')}"
    names = tuple(private + n if n.startswith("__") and not n.endswith("__") else n for n in names)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _of_slots(value: Any, names: list[str], seen: set[int]) -> Callable[[], None]:
    kept = {name: getattr(value, name) for name in names}
    within = _all_of([remember(each, seen) for each in kept.values()])

    def put_back() -> None:
        for name, each in kept.items():
            if getattr(value, name, None) is not each:
                object.__setattr__(value, name, each)
        if within is not None:
            within()

    return put_back


def _all_of(parts: Sequence[Callable[[], None] | None]) -> Callable[[], None] | None:
    known = [part for part in parts if part is not None]

    def put_back() -> None:
        for part in known:
            part()

    return put_back if known else None


def _of_tensor(value: Tensor, seen: set[int]) -> Callable[[], None]:
    there = value.detach()  # the same memory
    kept = there.clone()

    def put_back() -> None:
        there.copy_(kept)

    return put_back


def _of_array(value: Any, seen: set[int]) -> Callable[[], None] | None:
    kept = value.copy()

    def put_back() -> None:
        value[...] = kept

    return put_back if value.flags.writeable else None


def _of_list(value: Any, seen: set[int]) -> Callable[[], None]:
    items = list(value)
    parts = [part for item in items if (part := remember(item, seen)) is not None]

    def put_back() -> None:
        if len(value) != len(items) or any(a is not b for a, b in zip(value, items, strict=True)):
            value.clear()
            value.extend(items)
        for part in parts:
            part()

    return put_back


def _of_dict(value: Any, seen: set[int]) -> Callable[[], None]:
    items = dict(value)
    parts = [part for item in items.values() if (part := remember(item, seen)) is not None]

    def put_back() -> None:
        same = value.keys() == items.keys() and all(value[name] is items[name] for name in items)
        if not same:
            value.clear()
            value.update(items)
        for part in parts:
            part()

    return put_back


def _of_set(value: Any, seen: set[int]) -> Callable[[], None]:
    kept = set(value)

    def put_back() -> None:
        value.clear()
        value.update(kept)

    return put_back


def _of_tuple(value: Any, seen: set[int]) -> Callable[[], None] | None:
    return _all_of([remember(item, seen) for item in value])


def _of_method(value: Any, seen: set[int]) -> Callable[[], None] | None:
    return remember(value.__self__, seen)


def _of_partial(value: Any, seen: set[int]) -> Callable[[], None] | None:
    return _all_of([remember(each, seen) for each in (value.func, value.args, value.keywords)])


def _of_bytes(value: Any, seen: set[int]) -> Callable[[], None]:
    kept = value[:]

    def put_back() -> None:
        value[:] = kept

    return put_back


def _of_stream(read: Callable[[Any], Any], write: Callable[[Any, Any], None]) -> Any:
    def of(value: Any, seen: set[int]) -> Callable[[], None]:
        kept = read(value)
        return lambda: write(value, kept)

    return of


def _set_torch(stream: torch.Generator, state: Tensor) -> None:
    stream.set_state(state)


def _set_generator(stream: np.random.Generator, state: Any) -> None:
    stream.bit_generator.state = state


def _set_bits(stream: np.random.BitGenerator, state: Mapping[str, Any]) -> None:
    stream.state = state


KINDS: dict[type, Callable[[Any, set[int]], Callable[[], None] | None]] = {
    Tensor: _of_tensor,
    np.ndarray: _of_array,
    list: _of_list,
    deque: _of_list,
    dict: _of_dict,
    set: _of_set,
    tuple: _of_tuple,
    array: _of_bytes,
    bytearray: _of_bytes,
    partial: _of_partial,
    MethodType: _of_method,
    torch.Generator: _of_stream(torch.Generator.get_state, _set_torch),
    random.Random: _of_stream(random.Random.getstate, random.Random.setstate),
    np.random.Generator: _of_stream(lambda s: s.bit_generator.state, _set_generator),
    np.random.BitGenerator: _of_stream(lambda s: s.state, _set_bits),
    np.random.RandomState: _of_stream(np.random.RandomState.get_state, np.random.RandomState.set_state),
}
"""Types of objects whose state can be put back, with what remembers it."""
