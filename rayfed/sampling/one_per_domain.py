"""Draws one available client of each domain; `clients_per_round` is not used."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from rayfed.client_facts import ClientTable
from rayfed.sampling.base import Candidates, some_available


class OnePerDomain:
    """Draws one available client of each domain that has one."""

    def __call__(self, round: int, clients: Candidates, rng: np.random.Generator) -> Collection[str]:
        """Ids of the drawn clients; arguments as of `rayfed.sampling.base.Rule`."""
        domains = clients.table.places_by_domain()
        groups = [some_available(clients, places, 1, rng) for places in domains]
        chosen = [group[int(rng.integers(len(group)))] for group in groups if len(group)]
        return [clients.table.names[place] for place in chosen]

    def usual_size(self, clients: ClientTable, wanted: int) -> int:
        """Number of domains that have a client."""
        return sum(len(places) > 0 for places in clients.places_by_domain())


draw = OnePerDomain()
