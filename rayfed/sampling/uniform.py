"""Draws `clients_per_round` of the available clients, all with the same probability; or all of them."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from rayfed.sampling.base import Candidates, some_available


def draw(round: int, clients: Candidates, rng: np.random.Generator) -> Collection[str]:
    """Ids of the drawn clients; arguments as of `rayfed.sampling.base.Rule`."""
    places = some_available(clients, range(len(clients)), clients.wanted, rng)
    if clients.wanted >= len(places):
        return [clients.table.names[place] for place in places]
    drawn = rng.choice(len(places), size=clients.wanted, replace=False).tolist()
    return [clients.table.names[places[i]] for i in drawn]
