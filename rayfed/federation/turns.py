"""Runs the code of several clients in turns: each until it needs a result that is computed for all of them.

Every client has a thread, of which exactly one runs at a time, so the order of everything is fixed: the
thread of a client that has to wait wakes that of the next one. Global random states belong to the client
whose turn it is.
"""

from __future__ import annotations

import contextvars
import ctypes
import os
import random
from _thread import allocate_lock, get_native_id, start_new_thread
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence

R = TypeVar("R")

CORE: Any = getattr(ctypes.PyDLL(None), "sched_getcpu", None) if hasattr(os, "sched_setaffinity") else None
"""Function that tells on which core this thread runs; None where that, or choosing one, is not known."""

NUMPY: Any = np.random  # its annotations leave out what sets the global generator


class Cancelled(BaseException):
    """Ends the code of a client because another client of its group failed."""


class Unseeded(ISeedSequence):
    """Begins a generator of numpy that gets its seed afterwards; a usual one takes three times as long."""

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return np.zeros(n_words, dtype)


UNSEEDED: Any = Unseeded()


class Streams:
    """The random streams of one client, as `rayfed.seeds.seeded` begins them.

    What is not kept by client is the normal number that `np.random.randn` and its like hold back after an odd
    number of draws, because reading it takes 35 microseconds in each turn; code of clients should draw normal
    numbers from torch.

    Attributes:
        own: The generator that the client's code gets.
        torch: State of torch's global CPU stream while it is not this client's turn.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._devices: dict[torch.device, torch.Generator] = {}
        self.own = torch.Generator().manual_seed(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self._python = random.Random(seed).getstate()
        self._numpy: Any = np.random.MT19937(UNSEEDED)
        np.random.RandomState(self._numpy).seed(seed % 2**32)

    def begin(self) -> None:
        """Make these the global streams."""
        torch.set_rng_state(self.torch.get_state())
        random.setstate(self._python)
        NUMPY.set_bit_generator(self._numpy)

    def end(self) -> None:
        """Keep the states of the global streams until this client's next turn."""
        self.torch.set_state(torch.get_rng_state())
        self._python = random.getstate()

    def on(self, device: torch.device) -> torch.Generator:
        """The client's stream on a device, for code that runs outside its turn."""
        if device.type == "cpu":
            return self.torch
        if device not in self._devices:
            self._devices[device] = torch.Generator(device).manual_seed(self._seed)
        return self._devices[device]


@contextmanager
def restored() -> Iterator[None]:
    """Put the global streams back afterwards, which the turns of clients change."""
    state, python, numpy = torch.get_rng_state(), random.getstate(), NUMPY.get_bit_generator()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(python)
        NUMPY.set_bit_generator(numpy)


class Turn(Generic[R]):
    """The code of one client, which can be stopped at a request and continued with its answer.

    Attributes:
        streams: Random streams of the client.
        request: What the client waits for; None: its code has ended.
        result: What its code returned.
        error: What its code raised.
    """

    def __init__(self, work: Callable[[], R], streams: Streams) -> None:
        self.streams = streams
        self.request: Any = None
        self.result: R | None = None
        self.error: BaseException | None = None
        self._answer: Any = None
        self._cancelled = False
        self._thread: int | None = None
        self._cores = os.sched_getaffinity(0) if CORE is not None else set()
        self._go: SimpleQueue[None] = SimpleQueue()
        self._paused: Callable[[], None] = _nobody_waits
        self._ended = allocate_lock()
        self._ended.acquire()
        # The thread alone holds the work, which refers to what holds this turn, and drops it at its end.
        # threading.Thread would wait here until the thread runs, which takes three times as long.
        start_new_thread(contextvars.copy_context().run, (self._run, work))

    def resume(self, answer: Any, paused: Callable[[], None]) -> None:
        """Let the client's code run, with the answer to its request; its thread calls `paused` afterwards."""
        self._answer = answer
        self._paused = paused
        self.request = None
        self.streams.begin()
        if self._thread is not None:
            _call_here(self._thread)
        self._go.put(None)

    def ask(self, request: Any) -> Any:
        """Called by the client's code: wait for the answer to a request."""
        if not self._cancelled:  # else the code ends, and its cleaning up asks again
            self.request = request
            self._hand_over()
            self._wait()
        if self._cancelled:
            raise Cancelled
        return self._answer

    def cancel(self) -> None:
        """End the client's code at its request."""
        self._cancelled = True
        self._go.put(None)
        with self._ended:
            pass

    def _wait(self) -> None:
        """Wait for this client's turn; its code may use all cores that the process may use."""
        self._go.get()
        _run_anywhere(self._cores)

    def _hand_over(self) -> None:
        """Let the next client run."""
        self.streams.end()
        paused, self._paused = self._paused, _nobody_waits
        paused()

    def _run(self, work: Callable[[], R]) -> None:
        try:
            self._thread = get_native_id()
            self._wait()
            if not self._cancelled:
                self.result = work()
        except BaseException as err:
            self.error = err
        finally:
            self.request = None
            self._hand_over()
            self._ended.release()


def _call_here(thread: int) -> None:
    """Let a thread that sleeps continue on the core of this one, which is about to sleep.

    Linux would wake it on another core, where nothing of what they share is at hand, such as weights, code
    and the tensors of the last pass. It may move as soon as it runs (`_run_anywhere`).
    """
    if CORE is not None:
        with suppress(OSError):  # where a sandbox forbids it
            os.sched_setaffinity(thread, (CORE(),))


def _run_anywhere(cores: Iterable[int]) -> None:
    """Let this thread run on all of these cores again."""
    if CORE is not None:
        with suppress(OSError):
            os.sched_setaffinity(0, cores)


def _nobody_waits() -> None:
    """What the thread of a client does where no other one waits for it, because its code is ended."""


def take_turns(turns: Sequence[Turn[Any]], answers: Sequence[Any]) -> None:
    """Let the code of clients run, one after the other, each until its next request or its end.

    The thread of a client wakes that of the next one itself: to wake the caller in between would take as long
    once more. After the error of a client those after it do not run.

    Args:
        turns: The clients, in the order in which they run.
        answers: What each of them asked for; None for those that begin.
    """
    order = _Order(zip(turns, answers, strict=True))
    with restored():
        order.proceed()
        order.ended.get()


class _Order:
    """Clients whose code is still to run. A class, because a function that hands itself on is freed late."""

    def __init__(self, waiting: Iterator[tuple[Turn[Any], Any]]) -> None:
        self._waiting = waiting
        self.ended: SimpleQueue[None] = SimpleQueue()

    def proceed(self, last: Turn[Any] | None = None) -> None:
        """Let the next client run, unless the last one failed."""
        following = None if last is not None and last.error is not None else next(self._waiting, None)
        if following is None:
            self.ended.put(None)
        else:
            turn, answer = following
            turn.resume(answer, partial(self.proceed, turn))
