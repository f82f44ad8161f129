"""Where a program waits between its rounds, so that those of all programs can alternate.

A program reports the end of a round and goes on when it is told to. Values are handed over while the clock
stands. Nothing but the standard library is imported: every environment has it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client
from typing import Any

ADDRESS = "RIVALS_ADDRESS"
"""Environment variable with the path of the socket of the command; a program without it never waits."""
ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)


class Gate:
    """The line to the command that measures."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1)  # processes that daemons leave stay in the tree
        address = os.environ.get(ADDRESS)
        self.link = Client(address) if address else None

    def done(self, steps: int, examples: int, values: Callable[[], Mapping[str, Any]]) -> bool:
        """Report a round, and wait for the next one.

        Args:
            steps: Optimization steps of all clients in this round.
            examples: Examples in their batches.
            values: Gives the trained values of the server by name, as arrays.

        Returns:
            Whether there shall be another round.
        """
        if self.link is None:
            return True
        self.link.send((int(steps), int(examples)))
        while (asked := self.link.recv()) == "values":
            self.link.send(dict(values()))
        return bool(asked == "go")
