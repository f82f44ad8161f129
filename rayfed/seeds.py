"""Random streams by name: the same (seed, labels) gives the same numbers in every process.

The only module that touches global random streams.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive(seed: int, *labels: object) -> int:
    """A 63-bit seed for one purpose, such as `("fit", round, client)`.

    Names, not counters or positions: one more client or one more exchange shifts nobody else's numbers.
    """
    text = "\x1f".join(map(str, (seed, *labels)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *labels: object) -> np.random.Generator:
    """A private numpy generator for one purpose."""
    return np.random.default_rng(derive(seed, *labels))


@contextmanager
def seeded(seed: int) -> Iterator[torch.Generator]:
    """Set every global stream for one call, restore them after it, and yield a private generator.

    Dropout and library code draw from the global streams; everything of ours uses the generator.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        yield torch.Generator().manual_seed(seed)
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
