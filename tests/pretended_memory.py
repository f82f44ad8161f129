"""The memory of the pretended device: a caching allocator with a limit, as the one of torch for CUDA.

    with pretended() as device, memory(total=10**8) as its:
        torch.ones(3).to(device.name)
        its.live, its.free

The bytes of a tensor count until its last view is gone, so that what keeps a tensor alive can be seen. Freed
bytes stay reserved until `empty_cache`, or until a tensor does not fit otherwise.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from tests.pretended import TYPE, OnDevice


@dataclass
class Memory:
    """Bytes of the pretended device.

    Attributes:
        total: All that it has.
        others: What other processes use.
        context: What the device needs for this process, besides tensors.
        libraries: What its libraries need from the first operation on.
        live: What tensors use.
        reserved: What was taken from the device for tensors.
        peak: The largest `reserved` since `reset_peak_memory_stats`.
        most: The largest `reserved` that is allowed.
        emptied: Number of times that unused bytes were given back on request.
        asked: Number of tensors that did not fit.
    """

    total: int
    others: int = 0
    context: int = 0
    libraries: int = 0
    live: int = 0
    reserved: int = 0
    peak: int = 0
    most: float = float("inf")
    emptied: int = 0
    asked: int = 0
    _users: dict[int, int] = field(default_factory=dict)

    @property
    def free(self) -> int:
        """What `mem_get_info` says is free."""
        libraries = self.libraries if self.peak else 0
        return self.total - self.others - self.context - libraries - self.reserved

    def take(self, storage: torch.UntypedStorage) -> int:
        """Count a tensor; returns the address by which `drop` knows its bytes."""
        key, size = storage.data_ptr(), storage.nbytes()
        if not size:
            return 0
        if key not in self._users:
            if self.live + size > self.reserved:
                self._reserve(size)
            self.live += size
        self._users[key] = self._users.get(key, 0) + 1
        return key

    def _reserve(self, size: int) -> None:
        self.reserved = self.live  # torch gives back what it does not use before it gives up
        if size > self.free or self.reserved + size > self.most:
            self.asked += 1
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} B. GPU 0 has a total capacity of "
                f"{self.total} B of which {self.free} B is free. This process uses {self.live} B."
            )
        self.reserved += size
        self.peak = max(self.peak, self.reserved)

    def drop(self, key: int, size: int) -> None:
        if not key:
            return
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self.live -= size

    def empty_cache(self) -> None:
        self.emptied += 1
        self.reserved = self.live

    def reset_peak(self, device: Any = None) -> None:
        self.peak = self.reserved

    def limit(self, fraction: float, device: Any = None) -> None:
        self.most = fraction * self.total


@contextmanager
def memory(total: int, **rest: int) -> Iterator[Memory]:
    """Count the tensors of the pretended device that are made in the block; arguments as of `Memory`."""
    its = Memory(total, **rest)
    make = OnDevice.__new__

    def counted(cls: type[OnDevice], inner: torch.Tensor) -> OnDevice:
        made = make(cls, inner)
        storage = inner.untyped_storage()
        key = its.take(storage)
        weakref.finalize(made, its.drop, key, storage.nbytes())
        return made

    functions = {
        "mem_get_info": lambda device=None: (its.free, its.total),
        "max_memory_reserved": lambda device=None: its.peak,
        "memory_reserved": lambda device=None: its.reserved,
        "reset_peak_memory_stats": its.reset_peak,
        "empty_cache": its.empty_cache,
        "set_per_process_memory_fraction": its.limit,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.object(OnDevice, "__new__", staticmethod(counted)))
        for name, function in functions.items():
            stack.enter_context(patch.object(getattr(torch, TYPE), name, function, create=True))
        yield its
