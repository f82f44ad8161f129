"""Gives memory that is free in a process back to the machine, which glibc keeps in the pools of its threads.

A driver or a client actor has about 30 threads of Ray, whose pools fill with holes over the rounds. A client
actor keeps what it freed, because each pass needs it again, until it has grown by `SLACK`. Python's own
collection of garbage leaves out what a process made when it started.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import math
import time

import psutil

PAUSE = 10.0  # seconds between two times, which take milliseconds each

NEW_OBJECTS = 10_000
"""New objects after which Python looks for garbage among them, instead of 700: a visit makes thousands."""

SLACK = 32 * 2**20
"""Bytes by which a client actor grows before it gives free memory back. All that it gives back, some hundred
megabytes, it gets back page by page in its next visit, which takes up to half a second."""

KEPT = 256_000_000
"""Free bytes at the end of its memory that a client actor keeps."""

LARGEST = 32 * 2**20
"""Bytes of the largest tensors that are taken from this memory; glibc allows no more."""

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Names of glibc for the two numbers (`man mallopt`)."""


def keep_freed_memory() -> None:
    """Let this process keep freed memory until `Trim` gives it back; nothing happens without glibc.

    By default, glibc returns the end of its memory after a pass of many rows and gets it back page by page in
    the next one, which takes some percent of the time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT)
        mallopt(M_MMAP_THRESHOLD, LARGEST)


def leave_out_of_garbage_collection() -> None:
    """Let Python's garbage collection leave out all objects that exist now, until the process ends.

    torch, PEFT and Ray make half a million objects in a process. Without this, every few rounds a collection
    visits all of them, which takes 0.2 seconds and finds nothing. Garbage of former calls is collected first.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)  # the last collection frees what libraries report as leaked otherwise


class Trim:
    """Gives free memory back now and then; does nothing where the C library is not glibc."""

    def __init__(self, slack: int | None = None) -> None:
        """Args: slack: bytes by which the process must have grown since it worked after the last time."""
        self._malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._last = time.monotonic()
        self._slack = slack
        self._needs = 0.0
        self._process = psutil.Process()

    def now_and_then(self) -> bool:
        """Do it, unless that is not due; returns whether it was tried."""
        if time.monotonic() - self._last < PAUSE:
            return False
        self._last = time.monotonic()
        if self._slack is not None and not self._has_grown(self._slack):
            return False
        if self._malloc_trim is not None:
            self._malloc_trim(0)
        return True

    def _has_grown(self, slack: int) -> bool:
        """Whether the process is larger by `slack` bytes than after work for PAUSE seconds since then."""
        resident = self._process.memory_info().rss
        if resident > self._needs + slack:
            self._needs = math.inf
            return True
        self._needs = min(self._needs, resident)
        return False
