"""Gives memory that is free in a process back to the machine, which glibc keeps in the pools of its threads.

A driver or a client actor has about 30 threads of Ray, whose pools fill with holes over the rounds. Between
two such times client actors keep what they freed, because each pass needs it again.
"""

from __future__ import annotations

import ctypes
import time

PAUSE = 10.0  # seconds between two times, which take milliseconds each


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


class Trim:
    """Gives free memory back now and then; does nothing where the C library is not glibc."""

    def __init__(self) -> None:
        self._malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._last = time.monotonic()

    def now_and_then(self) -> bool:
        """Do it, unless that was done less than PAUSE seconds ago; returns whether it was tried."""
        if time.monotonic() - self._last < PAUSE:
            return False
        if self._malloc_trim is not None:
            self._malloc_trim(0)
        self._last = time.monotonic()
        return True
