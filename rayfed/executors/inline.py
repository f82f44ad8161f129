"""Everything in this process, one call after the other: for the debugger and for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rayfed.cohort import Call
from rayfed.types import Update
from rayfed.worker import Weights, Worker, World


class InlineExecutor:
    """The cohort in one process: a breakpoint inside a client just works."""

    def __init__(self, world: World, weights: Weights) -> None:
        self.worker = Worker(world, weights)
        self._stores: dict[str, Mapping[str, Any]] = {}

    def map(self, calls: Sequence[Call]) -> list[Update]:
        updates = []
        for call in calls:
            update, self._stores[call.client] = self.worker.call(call, self._stores.get(call.client, {}))
            updates.append(update)
        return updates

    def close(self) -> None:
        """Nothing was started."""
