"""State that the driver keeps for each client actor, and the messages that it sends to it.

Also measures whether starting client actors make progress (on a loaded machine a start can take minutes), and
learns from earlier calls how long a call takes, so that the longest ones are started first. Both decide only
where and when calls run, never what they answer.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from rayfed.federation.executor import Call

LOOK_EVERY = 2.0  # seconds between two measurements of the processes
GROWTH = 1_000_000  # bytes of memory that count as progress: an import maps and allocates more
LEAST_WORK = 0.05  # seconds of CPU that count as progress
TITLES = ("ray::ClientActor",)
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
    efforts = {}
    for process in _workers():
        with suppress(psutil.Error):
            if process.pid not in up:
                times = process.cpu_times()
                starts = any(title in " ".join(process.cmdline()) for title in TITLES)
                efforts[process.pid] = (
                    float(process.memory_info().rss),
                    times.user + times.system if starts else 0.0,
                )
    return efforts


def _workers() -> Iterator[psutil.Process]:
    """Processes that the raylet of this process has started, except this process."""
    own = psutil.Process()
    with suppress(psutil.Error):
        raylets = [p for p in (own.parent(), *own.children()) if p is not None and p.name() == "raylet"]
        for raylet in raylets:
            yield from (child for child in raylet.children() if child.pid != os.getpid())


ENOUGH = 8
"""Units of calls of an exchange after which the fit is used instead of the estimate."""

FORGETTING = 0.9
"""Weight of all earlier measurements at each new exchange: first visits take longer than later ones."""

SINGULAR = 1e-6
"""Smallest eigenvalue of the fit, as a share of the largest one, that is not taken for zero."""


class Pace:
    """Fits the seconds of the units of one exchange by least squares, separately for each of its tags.

    A unit of calls that share their passes takes a + b k + c sum(n) + d sum(n s) seconds, where k is the
    number of its calls, n the examples of a client and s the share of the blocks that it holds. Before
    ENOUGH units were measured, the estimate sum(n s) decides.
    """

    def __init__(self) -> None:
        self._fits: dict[str, _Fit] = {}

    def longest_first(self, calls: Sequence[Call], units: Sequence[list[int]]) -> list[list[int]]:
        """The units of an exchange that begins, in the order in which they should be started.

        Args:
            calls: The calls of the exchange, which have one tag.
            units: Positions of the calls that are run together.
        """
        if not calls:
            return list(units)
        fit = self._fits.setdefault(calls[0].tag, _Fit())
        fit.forget()
        return sorted(units, key=lambda unit: -fit.seconds(_facts([calls[i] for i in unit])))

    def measured(self, tag: str) -> int:
        """Number of units of the exchange with this tag that were measured."""
        return self._fits[tag].seen if tag in self._fits else 0

    def learn(self, calls: Sequence[Call], units: Sequence[list[int]], seconds: Mapping[int, float]) -> None:
        """Learn from units that were run.

        Args:
            calls: The calls of the exchange.
            units: Positions of the calls that were run together.
            seconds: Seconds of each call that was answered, by position; units with others are left out.
        """
        for unit in units:
            if seconds.keys() >= set(unit):
                facts = _facts([calls[i] for i in unit])
                self._fits.setdefault(calls[0].tag, _Fit()).add(facts, sum(seconds[i] for i in unit))


def _facts(calls: Sequence[Call]) -> npt.NDArray[np.float64]:
    examples = sum(call.examples for call in calls)
    return np.array([1.0, len(calls), examples, sum(call.cost for call in calls)])


class _Fit:
    """Sums of a weighted least-squares fit, which do not grow with the number of measurements."""

    def __init__(self) -> None:
        self._products = np.zeros((4, 4))
        self._targets = np.zeros(4)
        self.seen = 0
        self._factors: npt.NDArray[np.float64] | None = None

    def forget(self) -> None:
        self._products *= FORGETTING
        self._targets *= FORGETTING

    def add(self, facts: npt.NDArray[np.float64], seconds: float) -> None:
        self._products += np.outer(facts, facts)
        self._targets += seconds * facts
        self.seen += 1
        self._factors = None

    def seconds(self, facts: npt.NDArray[np.float64]) -> float:
        """Seconds of a unit; before enough were measured, today's estimate in arbitrary units."""
        if self.seen < ENOUGH:
            return float(facts[-1])
        if self._factors is None:
            size = np.sqrt(np.diag(self._products))
            size[size == 0] = 1.0  # no client has examples
            scaled = self._products / np.outer(size, size)
            self._factors = np.linalg.lstsq(scaled, self._targets / size, rcond=SINGULAR)[0] / size
        return float(facts @ self._factors)


@dataclass(frozen=True)
class WireCall:
    """A call whose large parts are arguments of the remote call, by their place among these.

    Attributes:
        call: The call, without its task, parameters and large values of `shared`.
        task: The task, pickled once for all calls of the exchange that have it: a class that no process can
            import travels by value, which takes up to 0.3 seconds.
        params: Place of the parameters.
        shared: Places of the large values of `shared`, by name.
        store: Place of the client's store; None: it keeps nothing.
    """

    call: Call
    task: bytes
    params: int
    shared: Mapping[str, int]
    store: int | None


def namespace() -> str:
    """A new Ray namespace. Names of actors must be unique in one, and two runs may have the same name."""
    return f"rayfed-{uuid.uuid4().hex[:12]}"


@dataclass(eq=False)
class ActorHandle:
    """A client actor and its state.

    Attributes:
        name: Name of the actor.
        options: Ray options with which it is started.
        actor: Its handle.
        starting: Resolves once the actor is up; None from then on.
        place: Node and process of the actor, once it is up.
        failed_starts: Number of actors in a row that died before they were up.
        since: Time (monotonic) at which its start or its current chunk began.
        own: Units of calls that only this lane may run, with one actor per client.
        busy: Number of chunks that were submitted to it and are not finished.
        started: Number of actors that were started for this lane.
        space: Namespace of their names, unless `options` has one.
    """

    name: str
    options: dict[str, Any]
    actor: Any = None
    starting: Any = None
    place: dict[str, Any] = field(default_factory=dict)
    failed_starts: int = 0
    since: float = 0.0
    own: deque[list[int]] = field(default_factory=deque)
    busy: int = 0
    started: int = 0
    space: str = field(default_factory=namespace)

    @property
    def ray_options(self) -> dict[str, Any]:
        """Options for the next actor. A replacement gets a new name: the old one may still be in use."""
        name = f"{self.name}+{self.started}" if self.started else self.name
        own = {"name": name, "namespace": self.space, "max_restarts": 0, "max_task_retries": 0}
        return {**own, **self.options}

    def begin(self, actor: Any) -> None:
        self.started += 1
        self.actor = actor
        self.change(actor.where.remote())

    def change(self, up: Any) -> None:
        """Await the actor; `up` resolves to its node and process once it can run calls."""
        self.starting = up
        self.since = time.monotonic()
        self.busy = 0


@dataclass(frozen=True)
class Job:
    """A submitted chunk of calls, in units of calls that are run together."""

    lane: ActorHandle
    units: list[list[int]]
    stores: list[Any]
    began: float

    @property
    def indices(self) -> list[int]:
        """Indices of all calls of the chunk, in order."""
        return [i for unit in self.units for i in unit]
