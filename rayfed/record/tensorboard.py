"""Writes the rounds of a run for TensorBoard."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rayfed.errors import StorageError
from rayfed.record.atomic_files import remove_file
from rayfed.record.trackers.tracker import Ending, Entry, scalars

TENSORBOARD = "tensorboard"


class Board:
    """Writes one event file; a continued run writes it again from the start, so that each step is there once.

    Records are written directly, because tensorboardX's own writer uses a thread, in which the error of a
    full disk would be lost.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / TENSORBOARD
        self._writer: Any = None

    def begin(self, entries: Iterable[Entry]) -> None:
        """Begin a new file with the rounds that are kept.

        Raises:
            StorageError: It cannot be written.
        """
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import RecordWriter

        self.close()
        for file in self.path.glob("events.out.tfevents.*"):
            remove_file(file)
        # TensorBoard reads files in the order of their names, and drops the data of removed ones.
        name = f"events.out.tfevents.{int(time.time())}.{os.getpid()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._writer = RecordWriter(str(self.path / name))
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
            for entry in entries:
                self.add(entry)
        except OSError as err:
            raise StorageError(f"cannot write {self.path}: {err.strerror}") from err

    def add(self, entry: Entry) -> None:
        """Write a round: all numbers of its row, and the scores of every domain."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(entry).items()]
        event = Event(wall_time=time.time(), step=entry["row"]["round"], summary=Summary(value=values))
        try:
            self._write(event)
        except OSError as err:
            raise StorageError(f"cannot write {self.path}: {err.strerror}") from err

    def close(self, ending: Ending = "killed") -> None:
        """Close the file; TensorBoard has no field for `ending`."""
        if self._writer is not None:
            with suppress(OSError):  # the last write has already raised the error of a full disk
                self._writer.close()
            self._writer = None

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()
