"""Whether examples of a size fit into memory, before the first of them is decoded."""

from __future__ import annotations

import psutil

from rayfed.errors import ResourceError
from rayfed.objective import objective

MOST_BYTES = 2**31 - 1
"""Largest example that NumPy describes as one record."""


def check_memory(task: str, size: int, at_once: int) -> None:
    """Refuse a size of examples that cannot be prepared on this machine.

    Args:
        task: What the data are for.
        size: Side of an image in pixels, or characters in a window.
        at_once: Examples that are in memory at the same time.

    Raises:
        ResourceError: Says what they need and what there is.
    """
    one = 3 * size**2 if objective(task).pixels else size
    need, free = one * at_once, psutil.virtual_memory().available
    if one > MOST_BYTES or need > free:
        raise ResourceError(
            f"model.size: {size} needs about {need / 1e9:.1f} GB of memory to prepare examples of that size, "
            f"{free / 1e9:.1f} GB are free; choose a smaller one"
        )
