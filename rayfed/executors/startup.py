"""Whether client actors that are starting get anywhere, which takes minutes on a loaded machine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

import psutil

LOOK_EVERY = 2.0  # seconds between two looks at the processes
GROWTH = 1_000_000  # bytes of memory that count as progress: an import maps and allocates more
LEAST_WORK = 0.05  # seconds of CPU that count as progress
TITLES = ("ray::ClientActor", "ray::TrialClient")
"""In the title of a process in which the constructor of a client actor runs."""


class StartProgress:
    """Notices when processes of actors on this machine that are starting get on.

    Ray's workers run at nice 15, so that on a loaded machine an import of five seconds can take minutes.
    While a worker imports what its actor needs, Ray calls it idle, but its memory grows, which that of an
    idle one does not; while the constructor runs, its CPU time counts. Actors on other machines are not seen;
    for them only the clock counts.
    """

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, float]] = {}
        self._looked = self.last = time.monotonic()

    def since(self, began: float, up: Iterable[int]) -> float:
        """Seconds without progress, for an actor whose start began then.

        Args:
            began: On the monotonic clock.
            up: Process ids of the actors that are up.
        """
        now = time.monotonic()
        if now - self._looked > LOOK_EVERY:
            self._looked, found = now, effort(set(up))
            for pid, (memory, seconds) in found.items():
                memory_before, seconds_before = self._before.get(pid, (0.0, 0.0))
                if memory > memory_before + GROWTH or seconds > seconds_before + LEAST_WORK:
                    # Only now, so that little by little is progress too.
                    self._before[pid], self.last = (memory, seconds), now
        return now - max(began, self.last)


def effort(up: set[int]) -> dict[int, tuple[float, float]]:
    """Bytes of memory of every worker that is no actor yet, and its CPU seconds where it is becoming one."""
    found = {}
    for process in _workers():
        with suppress(psutil.Error):
            if process.pid not in up:
                times, starts = process.cpu_times(), any(t in " ".join(process.cmdline()) for t in TITLES)
                found[process.pid] = (
                    float(process.memory_info().rss),
                    times.user + times.system if starts else 0.0,
                )
    return found


def _workers() -> Iterator[psutil.Process]:
    """Processes that the raylet of this process started, but for itself."""
    own = psutil.Process()
    with suppress(psutil.Error):
        raylets = [p for p in (own.parent(), *own.children()) if p is not None and p.name() == "raylet"]
        for raylet in raylets:
            yield from (child for child in raylet.children() if child.pid != os.getpid())
