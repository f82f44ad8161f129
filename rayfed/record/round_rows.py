"""Appends each finished round to rounds.jsonl, or writes the file anew where it cannot.

Appending takes the same time however many rounds there were before. The history of the run has the same rows,
so a file that a crash cut off or that was changed is written again from there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayfed.record.files import GrowingFile
from rayfed.record.history import History
from rayfed.record.layout import ROWS


class RoundRows:
    """The rows of all rounds of a run, as JSON lines."""

    def __init__(self, run: Path, history: History) -> None:
        """Args: run: its folder. history: has the row of every round, the newest one included."""
        self._history = history
        self._lines = GrowingFile(run / ROWS)

    def begin(self) -> None:
        """Write the file from the history, if it has any rounds."""
        rows = [entry["row"] for entry in self._history.entries()]
        if rows:
            self._lines.write(map(_line, rows))

    def add(self, row: Mapping[str, Any]) -> None:
        """Append the round that was written into the history last.

        Raises:
            StorageError: The file cannot be written.
        """
        if not self._lines.append(_line(row)):
            self.begin()


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
