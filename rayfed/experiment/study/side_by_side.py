"""Runs cells of a study side by side, each in one of a few processes that live as long as the study runs."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Protocol

from rayfed.config.schema import Config, to_dict
from rayfed.devices import chosen_device
from rayfed.errors import ConfigError, OutputClosedError, cause_of
from rayfed.experiment.single_run import Show
from rayfed.experiment.study.run_cell import CommonParts, Outcome, StudyCell, run_cell
from rayfed.experiment.study.worker_process import packed, with_values
from rayfed.user_objects import Known, known_in

PROGRAM = "from rayfed.experiment.study.worker_process import main; main()"
LOOK = 0.5  # seconds until the main thread looks for Ctrl-C


class Lanes(Protocol):
    """Runs cells, as many at once as there is room for."""

    size: int

    def start(self, cell: StudyCell) -> None:
        """Begin a cell; at most `size` are begun and not ended."""

    def ended(self) -> Iterator[tuple[StudyCell, Outcome]]:
        """Wait until one cell or more have ended, and yield what became of them."""


class OneAfterTheOther:
    """Runs each cell in this process.

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
            try:
                outcome = run_cell(cell, self._memory, self._show)
            except OutputClosedError:
                raise
            except Exception as err:  # a method may raise anything
                outcome = Outcome(failed=cause_of(err))
            yield cell, outcome


class Process:
    """A process that runs one cell at a time (`worker_process`)."""

    def __init__(self) -> None:
        here = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": here},
        )
        self._known: set[str] = set()

    def run(self, cell: StudyCell) -> Outcome:
        """Run a cell there, and wait for it."""
        assert self._process.stdin is not None  # it is a pipe
        assert self._process.stdout is not None
        try:
            new = {name: each for name, each in _objects(cell.config).items() if name not in self._known}
            self._known |= new.keys()
            pickle.dump((packed(with_values(new)), packed(cell)), self._process.stdin)
            self._process.stdin.flush()
            outcome: Outcome = pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            code = self._process.wait()
            return Outcome(failed=f"its process ended with code {code}; messages of it are above")
        return outcome

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """End the process, at once; the finished rounds of its cell are on disk."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Beside:
    """Runs each cell in one of several processes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes = [Process() for _ in range(size)]
        self._free: SimpleQueue[int] = SimpleQueue()
        for number in range(size):
            self._free.put(number)
        self._threads = ThreadPoolExecutor(size)
        self._running: dict[Future[Outcome], StudyCell] = {}

    def start(self, cell: StudyCell) -> None:
        self._running[self._threads.submit(self._work, cell)] = cell

    def ended(self) -> Iterator[tuple[StudyCell, Outcome]]:
        done: set[Future[Outcome]] = set()
        while self._running and not done:
            done, _ = wait(self._running, LOOK, FIRST_COMPLETED)
        for future in done:
            yield self._running.pop(future), future.result()

    def _work(self, cell: StudyCell) -> Outcome:
        number = self._free.get()
        try:
            if not self._processes[number].is_alive:
                self._processes[number].end()
                self._processes[number] = Process()
            return self._processes[number].run(cell)
        finally:
            self._free.put(number)

    def end(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.end()
        self._threads.shutdown(wait=True, cancel_futures=True)


@contextmanager
def lanes(size: int, show: Show, common: CommonParts) -> Iterator[Lanes]:
    """Runs cells while the block runs: in this process, or in `size` others where that is more than one."""
    if size == 1:
        yield OneAfterTheOther(show, common)
        return
    beside = Beside(size)
    try:
        yield beside
    finally:
        beside.end()


def how_many(at_once: int | Literal["auto"], configs: Sequence[Config], stop: Any) -> tuple[int, str]:
    """The number of cells side by side, and a sentence on why it is one where `auto` asked for more.

    Args:
        at_once: What the user asked for.
        configs: The cells that wait.
        stop: The rule that may end a cell, which travels to the processes, too.

    Raises:
        ConfigError: The number is wrong, or these cells cannot run side by side.
    """
    if at_once != "auto" and (not isinstance(at_once, int) or isinstance(at_once, bool) or at_once < 1):
        raise ConfigError(f"at_once: {at_once!r} is neither a number of 1 or more nor 'auto'")
    if at_once == 1 or len(configs) < 2:
        return 1, ""
    if reason := why_not_beside(configs, stop):
        if at_once == "auto":
            return 1, f"cells run one after the other: {reason}"
        raise ConfigError(f"at_once: {at_once} is impossible: {reason}; leave out at_once")
    if at_once != "auto":
        return min(at_once, len(configs)), ""
    if any(chosen_device(config.cluster.device).type != "cpu" for config in configs):
        return 1, "cells run one after the other: they use one GPU; at_once=2 shares it"
    threads = max(config.cluster.threads for config in configs)
    return max(1, min(len(configs), _cores() // threads)), ""


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def why_not_beside(configs: Sequence[Config], stop: Any) -> str:
    """The reason why cells cannot run in other processes; empty: they can."""
    if any(config.cluster.executor != "inline" for config in configs):
        return "a cell of cluster.executor=ray has all actors of its Ray; set cluster='inline'"
    every = {name: known for config in configs for name, known in _objects(config).items()}
    for name, known in every.items():
        if why := _why_not_sent(with_values({name: known})):
            return f"{name} cannot be sent to another process ({why})"
    if stop is not None and (why := _why_not_sent(stop)):
        return f"stop cannot be sent to another process ({why})"
    return ""


def _why_not_sent(value: Any) -> str:
    try:
        packed(value)
    except Exception as err:  # pickling calls code of the user
        return cause_of(err)
    return ""


def _objects(config: Config) -> dict[str, Known]:
    """The objects of a user that a config names."""
    return known_in(to_dict(config))
