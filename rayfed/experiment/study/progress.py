"""Tells of a study while it runs: which cells begin and end, and how long the others will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rayfed.experiment.study.coordinates import Key, in_words
from rayfed.experiment.study.run_cell import Outcome

if TYPE_CHECKING:
    from rayfed.config.schema import Config


class Progress:
    """Tells which cells begin and end with lines of text; other ways to show a study change its methods.

    Attributes:
        tell: Shows a line.
        cells: The experiments by coordinates, in the order in which they were given.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        """Begin to tell.

        Args:
            tell: Shows a line.
        """
        self.tell = tell
        self.cells: Mapping[Key, Config] = {}
        self._names: Sequence[str] = ()
        self._before = 0

    def start(self, cells: Mapping[Key, Config], names: Sequence[str], finished: Mapping[Key, str]) -> None:
        """The study begins, before anything is started.

        Args:
            cells: All experiments, each with the folder of its cell as `output`.
            names: Names of the coordinates.
            finished: Digests of the cells that were finished before; empty for one that a rule ended.
        """
        self.cells, self._names = cells, names
        self._before, self._ended = len(finished), 0
        self._began = time.perf_counter()
        if finished:
            self.tell(f"{len(finished)} of {len(cells)} cells are finished")

    def grow(self, cells: Mapping[Key, Config], finished: Mapping[Key, str]) -> None:
        """All cells have ended, and there are more, or are before `start`.

        Args:
            cells: The new experiments by coordinates.
            finished: As of `start`.
        """
        self.cells = {**self.cells, **cells}
        self._before += sum(key in finished for key in cells)

    def begin(self, key: Key, size: int) -> None:
        """A cell begins. Args: size: number of cells that run at once."""
        if size == 1:
            number = self._before + self._ended + 1
            self.tell(f"\ncell {number} of {len(self.cells)}: {in_words(key, self._names)}")

    def end(self, key: Key, outcome: Outcome) -> None:
        """A cell ended; what it left is on disk, and the manifest has it."""
        self._ended += 1
        done = self._before + self._ended
        total = len(self.cells)
        seconds = (time.perf_counter() - self._began) / self._ended * (total - done)
        left = f"; about {duration(seconds)} left" if done < total else ""
        what = f"failed: {outcome.failed}" if outcome.failed else "finished"
        what = f"stopped after round {outcome.stopped}" if outcome.stopped else what
        self.tell(f"{done}/{total}  {in_words(key, self._names)}: {what}{left}")

    def look(self) -> None:
        """A moment passed, where cells run side by side."""


def duration(seconds: float) -> str:
    """Seconds with a suitable unit.

    >>> duration(36.0), duration(1800.0), duration(108_000.0)
    ('36 s', '30 min', '30.0 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
