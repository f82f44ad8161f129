"""Lanes: each runs one cell of a study at a time, in this process, in another one, or on Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Protocol

from rayfed.errors import OutputClosedError, cause_of
from rayfed.experiment.kept_session import session_of
from rayfed.experiment.single_run import Show
from rayfed.experiment.study.run_cell import CommonParts, Outcome, StudyCell, run_cell

LOOK = 0.5  # seconds until the main thread looks for Ctrl-C, and whether Ray was lost


class Lanes(Protocol):
    """Runs cells, as many at once as there is room for."""

    size: int

    def start(self, cell: StudyCell) -> None:
        """Begin a cell; at most `size` are begun and not ended."""

    def ended(self) -> Iterator[tuple[StudyCell, Outcome]]:
        """Wait until cells have ended, and yield what became of them; nothing where a moment passed.

        Raises:
            ClusterError: The Ray of the cells was lost.
        """


class OneAfterTheOther:
    """Runs each cell in this process, or on the Ray that its runs have in common.

    Args:
        show: What is shown of the rounds.
        common: What cells have in common.
    """

    size = 1

    def __init__(self, show: Show, common: CommonParts) -> None:
        self._show, self._memory = show, common
        self._begun: list[StudyCell] = []

    def start(self, cell: StudyCell) -> None:
        self._begun.append(cell)

    def ended(self) -> Iterator[tuple[StudyCell, Outcome]]:
        while self._begun:
            cell = self._begun.pop()
            session = session_of(cell.config)
            try:
                outcome = run_cell(cell, self._memory, self._show, session)
            except OutputClosedError:
                raise
            except Exception as err:  # a method may raise anything
                if session.lost:
                    raise
                outcome = Outcome(failed=cause_of(err))
            yield cell, outcome


class CellLane(Protocol):
    """Runs one cell at a time."""

    def run(self, cell: StudyCell) -> Outcome:
        """Run a cell, and wait for its end."""

    def end(self) -> None:
        """End at once; the finished rounds of a cell that runs are on disk."""


class Beside:
    """Runs cells side by side, with a thread of this process for each lane.

    Args:
        lanes: The lanes.
        look: Called every `LOOK` seconds; raises where the cells cannot go on.
    """

    def __init__(self, lanes: Sequence[CellLane], look: Callable[[], None] = lambda: None) -> None:
        self.size = len(lanes)
        self._lanes, self._look = lanes, look
        self._free: SimpleQueue[CellLane] = SimpleQueue()
        for lane in lanes:
            self._free.put(lane)
        self._threads = ThreadPoolExecutor(self.size)
        self._running: dict[Future[Outcome], StudyCell] = {}

    def start(self, cell: StudyCell) -> None:
        self._running[self._threads.submit(self._work, cell)] = cell

    def ended(self) -> Iterator[tuple[StudyCell, Outcome]]:
        done, _ = wait(self._running, LOOK, FIRST_COMPLETED)
        for future in done:
            yield self._running.pop(future), future.result()
        self._look()

    def _work(self, cell: StudyCell) -> Outcome:
        lane = self._free.get()
        try:
            return lane.run(cell)
        finally:
            self._free.put(lane)

    def end(self) -> None:
        """End all lanes."""
        for lane in self._lanes:
            lane.end()
        self._threads.shutdown(wait=True, cancel_futures=True)
