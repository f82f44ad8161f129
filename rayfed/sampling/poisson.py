"""Draws each available client independently, such that `clients_per_round` are expected."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from rayfed.sampling import base
from rayfed.sampling.base import Candidates


def draw(round: int, clients: Candidates, rng: np.random.Generator) -> Collection[str]:
    """Ids of the drawn clients; arguments as of `rayfed.sampling.base.Rule`.

    Of very many clients only those that are drawn are asked whether they are available.
    """
    names = clients.table.names
    there: Sequence[int] = range(len(clients))
    few = not clients.all_available and len(clients) < base.MANY
    if few:
        there = [place for place in there if clients.is_available(names[place])]
    rate = clients.wanted / len(clients)
    drawn = [names[there[i]] for i in np.flatnonzero(rng.random(len(there)) < rate).tolist()]
    return drawn if few else list(filter(clients.is_available, drawn))
