"""A lane in another process, which runs one cell of a study at a time and lives as long as the study runs."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

from rayfed.config.schema import Config, to_dict
from rayfed.experiment.study.run_cell import Outcome, StudyCell
from rayfed.experiment.study.worker_process import packed, with_values
from rayfed.user_objects import Known, known_in

PROGRAM = "from rayfed.experiment.study.worker_process import main; main()"


class ProcessLane:
    """Runs one cell at a time in another process (`worker_process`); one that died is replaced."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        here = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": here},
        )
        self._known: set[str] = set()

    def run(self, cell: StudyCell) -> Outcome:
        """Run a cell there, and wait for its end."""
        if self._process.poll() is not None:
            self.end()
            self._start()
        assert self._process.stdin is not None  # it is a pipe
        assert self._process.stdout is not None
        try:
            new = {name: each for name, each in objects_in(cell.config).items() if name not in self._known}
            self._known |= new.keys()
            pickle.dump((packed(with_values(new)), packed(cell)), self._process.stdin)
            self._process.stdin.flush()
            outcome: Outcome = pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            code = self._process.wait()
            return Outcome(failed=f"its process ended with code {code}; messages of it are above")
        return outcome

    def end(self) -> None:
        """End the process, at once; the finished rounds of its cell are on disk."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def objects_in(config: Config) -> dict[str, Known]:
    """The objects of a user that a config names."""
    return known_in(to_dict(config))
