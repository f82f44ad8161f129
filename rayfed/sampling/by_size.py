"""Draws `clients_per_round` of the available clients, with probabilities by their numbers of examples."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from rayfed.sampling.base import Candidates


def draw(round: int, clients: Candidates, rng: np.random.Generator) -> Collection[str]:
    """Ids of the drawn clients, without repetition; arguments as of `rayfed.sampling.base.Rule`.

    The mean of the answers still weighs each client by its number of examples, unless
    `server.weighting=uniform` is set.
    """
    there = clients.available
    sizes = np.array([clients[one].num_examples for one in there], dtype=np.float64)
    count = min(clients.wanted, int(np.count_nonzero(sizes)))
    if not count:
        return []
    return [there[i] for i in rng.choice(len(there), count, replace=False, p=sizes / sizes.sum()).tolist()]
