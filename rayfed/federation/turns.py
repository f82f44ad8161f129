"""Runs the code of several clients in turns: each until it needs a result that is computed for all of them.

Every client has a thread, of which exactly one runs at a time, so the order of everything is fixed. Global
random states belong to the client whose turn it is.
"""

from __future__ import annotations

import contextvars
import random
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import numpy as np
import torch

R = TypeVar("R")

NUMPY: Any = np.random  # its annotations leave out what sets the global generator


class Cancelled(BaseException):
    """Ends the code of a client because another client of its group failed."""


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
        self._numpy: Any = np.random.MT19937(0)  # quicker than without a seed
        np.random.RandomState(self._numpy).seed(seed % 2**32)

    def swap(self) -> None:
        """Exchange the global states with those of this client; a second call restores them."""
        state = torch.get_rng_state()
        torch.set_rng_state(self.torch.get_state())
        self.torch.set_state(state)
        python = random.getstate()
        random.setstate(self._python)
        self._python = python
        numpy = NUMPY.get_bit_generator()
        NUMPY.set_bit_generator(self._numpy)
        self._numpy = numpy

    def on(self, device: torch.device) -> torch.Generator:
        """The client's stream on a device, for code that runs outside its turn."""
        if device.type == "cpu":
            return self.torch
        if device not in self._devices:
            self._devices[device] = torch.Generator(device).manual_seed(self._seed)
        return self._devices[device]


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
        self._go: SimpleQueue[None] = SimpleQueue()
        self._paused: SimpleQueue[None] = SimpleQueue()
        self._ended = allocate_lock()
        self._ended.acquire()
        # The thread alone holds the work, which refers to what holds this turn, and drops it at its end.
        # threading.Thread would wait here until the thread runs, which takes three times as long.
        start_new_thread(contextvars.copy_context().run, (self._run, work))

    def resume(self, answer: Any = None) -> None:
        """Let the client's code run, with the answer to its request, until its next request or its end."""
        self._answer = answer
        self.request = None
        self.streams.swap()
        self._go.put(None)
        try:
            self._paused.get()
        finally:
            self.streams.swap()

    def ask(self, request: Any) -> Any:
        """Called by the client's code: wait for the answer to a request."""
        if not self._cancelled:  # else the code ends, and its cleaning up asks again
            self.request = request
            self._paused.put(None)
            self._go.get()
        if self._cancelled:
            raise Cancelled
        return self._answer

    def cancel(self) -> None:
        """End the client's code at its request."""
        self._cancelled = True
        self._go.put(None)
        with self._ended:
            pass

    def _run(self, work: Callable[[], R]) -> None:
        try:
            self._go.get()
            if not self._cancelled:
                self.result = work()
        except BaseException as err:
            self.error = err
        finally:
            self.request = None
            self._paused.put(None)
            self._ended.release()
