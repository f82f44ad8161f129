"""Starts a program, lets it run one round at a time, and reads what its processes used."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from benchmarks.rivals.gate import ADDRESS

MIDST = 0.04
"""Processor seconds after which a program is in the middle of its next round."""
SAMPLING = 0.5
"""Seconds between two readings of the memory, which are made in the first two rounds only."""


@dataclass(frozen=True)
class Round:
    """One round of a program.

    Attributes:
        seconds: By the clock; of the first round since the command began.
        processor: Processor seconds of all its processes in this time.
        steps, rows: Optimization steps, and examples in their batches, as the program counted them.
    """

    seconds: float
    processor: float
    steps: int
    rows: int


class ProgramError(Exception):
    """A program ended before its time; with the end of what it wrote."""


def processor_seconds(times: Iterable[Any]) -> float:
    """Processor seconds of the processes of a tree, those that ended and were waited for included."""
    return float(sum(t.user + t.system + t.children_user + t.children_system for t in times))


def tree(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def readings(processes: Sequence[psutil.Process], name: str) -> Iterator[Any]:
    """Results of a method of psutil for the processes that are still there."""
    for process in processes:
        try:
            yield getattr(process, name)()
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue


def memory(pid: int) -> int:
    """Bytes of a tree, with pages that several processes share counted once (the sum of PSS)."""
    return sum(found.pss for found in readings(tree(pid), "memory_full_info"))


class Program:
    """A program of a side, which waits between its rounds."""

    def __init__(self, command: Sequence[str], variables: dict[str, str], log: Path) -> None:
        """Start it."""
        self._folder = tempfile.TemporaryDirectory(prefix="rivals-")
        address = f"{self._folder.name}/gate"
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(address)
        self._server.listen(1)
        self._server.settimeout(1)
        self._log = log
        self._link: Connection | None = None
        self.peak = 0
        self._began = time.perf_counter()
        with log.open("w") as out:
            self._process = subprocess.Popen(
                command, env={**variables, ADDRESS: address}, stdout=out, stderr=subprocess.STDOUT
            )
        self._used = 0.0

    def round(self, weighs: bool = False) -> Round:
        """Let it run the next round. Args: weighs: whether the peak of its memory is taken."""
        if self._link is not None:
            self._began, self._used = time.perf_counter(), self._processor()
            self._tell("go")
        with self._weighing(weighs):
            steps, rows = self._answer()
        seconds = time.perf_counter() - self._began
        return Round(seconds, self._processor() - self._used, steps, rows)

    def values(self) -> dict[str, Any]:
        """The trained values of the server after the last round."""
        self._tell("values")
        values: dict[str, Any] = self._answer()
        return values

    def close(self, at_once: bool = False) -> None:
        """Let it end, or end it and all its processes. Args: at_once: kill it in the middle of a round."""
        used = self._processor()
        with suppress(ProgramError):
            self._tell("go")
        if not at_once:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
        else:
            latest = time.monotonic() + 5
            while self._processor() - used < MIDST and time.monotonic() < latest:
                time.sleep(0.005)
        for process in reversed(tree(self._process.pid)):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._server.close()
        self._folder.cleanup()

    def _processor(self) -> float:
        return processor_seconds(readings(tree(self._process.pid), "cpu_times"))

    def _tell(self, what: str) -> None:
        """Send a message, if the program is there already.

        Raises:
            ProgramError: It ended.
        """
        if self._link is not None:
            try:
                self._link.send(what)
            except OSError:
                raise ProgramError(self._end_of_log()) from None

    def _answer(self) -> Any:
        """The next message of the program.

        Raises:
            ProgramError: It ended.
        """
        while self._link is None:
            try:
                self._link = Connection(self._server.accept()[0].detach())
            except TimeoutError:
                self._check_runs()
        while not self._link.poll(1):
            self._check_runs()
        try:
            return self._link.recv()
        except (EOFError, OSError):
            raise ProgramError(self._end_of_log()) from None

    def _check_runs(self) -> None:
        if self._process.poll() is not None:
            raise ProgramError(self._end_of_log())

    def _end_of_log(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it wrote nothing"

    @contextmanager
    def _weighing(self, weighs: bool) -> Iterator[None]:
        """Read the memory of the tree again and again for the length of a block."""
        done = threading.Event()

        def read() -> None:
            while not done.wait(SAMPLING):
                self.peak = max(self.peak, memory(self._process.pid))

        thread = threading.Thread(target=read, daemon=True)
        if weighs:
            thread.start()
        try:
            yield
        finally:
            done.set()
            if weighs:
                thread.join()
