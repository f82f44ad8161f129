"""Trackio, which keeps runs in a database of this machine, or sends them to a Space."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import ClassVar

from rayfed.record.trackers.tracker import PROJECT, Ending, Tracker, home_of


@contextmanager
def _quiet() -> Iterator[None]:
    """Let the library print nothing in the block."""
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        yield


class Trackio(Tracker):
    """A run of Trackio, in the database of TRACKIO_DIR."""

    library: ClassVar[str] = "trackio"
    variables: ClassVar[tuple[str, ...]] = ("TRACKIO_", "HF_TOKEN")

    def open(self) -> None:
        import trackio

        self.id = self.id or self.run.relative_to(home_of(self.run)).as_posix()
        with _quiet():
            self._run = trackio.init(
                project=self.environment.get("TRACKIO_PROJECT") or PROJECT,
                name=self.id,
                config=dict(self.config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def send(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def end(self, ending: Ending) -> None:
        with _quiet():
            self._run.finish()


TRACKER = Trackio
