"""Random streams by name: the same (seed, labels) gives the same numbers in every process.

Only this module, and `rayfed.fast.group` for the clients of a group, set global random states.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def derive(seed: int, *labels: object) -> int:
    """A 63-bit seed for one purpose, such as `("fit", round, client)`.

    Streams are identified by labels and not by counters, so that an additional client or exchange does not
    change the random numbers of the others.
    """
    text = "\x1f".join(map(str, (seed, *labels)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *labels: object) -> np.random.Generator:
    """A new numpy generator for one purpose, seeded by `derive(seed, *labels)`."""
    return np.random.default_rng(derive(seed, *labels))


@contextmanager
def use_seed(seed: int) -> Iterator[torch.Generator]:
    """Seed all global random states for the length of a block, and restore them afterwards.

    Dropout and library code use the global states; code of RayFed uses the generator.

    Yields:
        A torch CPU generator with the same seed.
    """
    python = random.getstate()
    numpy = np.random.get_state()
    torch_cpu = torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    _seed_torch(seed)
    try:
        yield torch.Generator().manual_seed(seed)
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_cpu)


def _seed_torch(seed: int) -> None:
    """Seed torch's global streams of the CPU and of all devices of the machine.

    `torch.manual_seed` would also note the stack of the caller for each type of device that is not there,
    which takes about a millisecond.
    """
    torch.default_generator.manual_seed(seed)
    if torch.accelerator.is_available():
        device: Any = torch.accelerator.current_accelerator()
        module = getattr(torch, device.type)
        everywhere = getattr(module, "manual_seed_all", None) or module.manual_seed  # Apple has one device
        everywhere(seed)


@contextmanager
def cpu_seeded(seed: int) -> Iterator[None]:
    """Seed torch's global CPU stream for the length of a block, and restore it; devices are not touched."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
