"""Graphs of the pretended device: its operations are recorded, and computed anew into the same memory.

    with pretended() as device, recording() as recorders:
        Worker(..., device=device.name)  # with train.graphs=true
        recorders[0].replays

A replay runs the operations with the tensors and the numbers that they had when they were recorded, as a
graph of CUDA does. So what is not at a fixed place, and numbers of Python that should change, give wrong
results. As on CUDA, recorded operations compute nothing that is read outside before the first replay, and
waiting for the device or copying from the CPU while operations are recorded is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_leaves

from rayfed.fast import graphs
from tests import pretended


class PretendedRecorder:
    """Records operations of the pretended device.

    Attributes:
        records: Number of recordings that ended well.
        replays: Number of replays.
        fails: Raised in the recordings that are numbered here.
    """

    def __init__(self, device: torch.device, fails: dict[int, Exception] | None = None) -> None:
        self.records = 0
        self.replays = 0
        self.fails = fails or {}
        self._asked = 0

    def run_unrecorded(self, work: Callable[[], object]) -> None:
        work()

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self._asked += 1
        if self._asked in self.fails:
            raise self.fails[self._asked]
        tape: list[Any] = []
        with patch.object(pretended, "TAPE", tape):
            result = work()
        self.records += 1
        for tensor in tree_leaves(result):
            if isinstance(tensor, pretended.OnDevice) and tensor.is_floating_point():
                tensor.inner.detach().fill_(float("nan"))  # a recording computes nothing

        def replay() -> None:
            self.replays += 1
            pretended.COUNTS.kernels += 1
            for func, args, kwargs, results in tape:
                again = tree_leaves(func(*args, **kwargs))
                for old, new in zip(results, again, strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return torch.no_grad()(replay), result

    def address(self, tensor: Any) -> int:
        return int(tensor.inner.data_ptr())


@contextmanager
def recording(fails: dict[int, Exception] | None = None) -> Iterator[list[PretendedRecorder]]:
    """Within the block the pretended device has graphs; yields its recorders, one for each model."""
    made: list[PretendedRecorder] = []

    def recorder(device: torch.device) -> PretendedRecorder:
        made.append(PretendedRecorder(device, fails))
        return made[-1]

    with patch.dict(graphs.RECORDERS, {pretended.TYPE: recorder}):
        yield made
