"""Measures whether starting client actors make progress; on a loaded machine a start can take minutes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

import psutil

LOOK_EVERY = 2.0  # seconds between two measurements of the processes
GROWTH = 1_000_000  # bytes of memory that count as progress: an import maps and allocates more
LEAST_WORK = 0.05  # seconds of CPU that count as progress
TITLES = ("ray::ClientActor", "ray::TrialClient")
"""Titles of processes in which the constructor of a client actor runs."""


class StartProgress:
    """Detects progress of starting actors on this machine by the memory and CPU time of their processes.

    Ray's workers run at nice 15, so that on a loaded machine an import of five seconds can take minutes.
    While a worker imports modules for its actor, Ray calls it idle, but its memory grows; while the
    constructor runs, its CPU time counts. For actors on other machines only the elapsed time is known.
    """

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, float]] = {}
        self._looked = self.last = time.monotonic()

    def since(self, began: float, up: Iterable[int]) -> float:
        """Seconds without progress of an actor.

        Args:
            began: Time (monotonic) at which its start began.
            up: Process ids of the actors that have started.
        """
        now = time.monotonic()
        if now - self._looked > LOOK_EVERY:
            self._looked = now
            for pid, (memory, seconds) in effort(set(up)).items():
                memory_before, seconds_before = self._before.get(pid, (0.0, 0.0))
                if memory > memory_before + GROWTH or seconds > seconds_before + LEAST_WORK:
                    # Updated only here, so that several small steps add up to progress.
                    self._before[pid] = (memory, seconds)
                    self.last = now
        return now - max(began, self.last)


def effort(up: set[int]) -> dict[int, tuple[float, float]]:
    """Memory in bytes of every worker that is not yet an actor, and CPU seconds if its constructor runs."""
    found = {}
    for process in _workers():
        with suppress(psutil.Error):
            if process.pid not in up:
                times = process.cpu_times()
                starts = any(title in " ".join(process.cmdline()) for title in TITLES)
                found[process.pid] = (
                    float(process.memory_info().rss),
                    times.user + times.system if starts else 0.0,
                )
    return found


def _workers() -> Iterator[psutil.Process]:
    """Processes that the raylet of this process has started, except this process."""
    own = psutil.Process()
    with suppress(psutil.Error):
        raylets = [p for p in (own.parent(), *own.children()) if p is not None and p.name() == "raylet"]
        for raylet in raylets:
            yield from (child for child in raylet.children() if child.pid != os.getpid())
