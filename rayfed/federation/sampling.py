"""Draws the clients of a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Literal, TypeAlias

import numpy as np

from rayfed.client_facts import ClientTable
from rayfed.heterogeneity.faults import Faults
from rayfed.seeds import generator

Sampling: TypeAlias = Literal["uniform", "poisson", "one_per_domain"]
"""The ways in which the clients of a round are drawn."""

MANY = 10_000
"""From this number of clients on, only those that might be drawn are asked whether they are available."""


def sample(
    clients: ClientTable, wanted: int, sampling: Sampling, faults: Faults | None, seed: int, round: int
) -> tuple[str, ...]:
    """Ids of the cohort, in client order: all, a uniform or Poisson draw, or one client of each domain.

    Only available clients are drawn; where there are fewer than `wanted`, all of them take part.

    Args:
        clients: All clients.
        wanted: Number of clients to draw, with poisson its mean if all are available; not used by
            one_per_domain.
        sampling: How the cohort is drawn.
        faults: They tell who is available; None: everybody.
        seed: Seed of the experiment.
        round: Round index, from 0.
    """
    rng = generator(seed, "sample", round)
    is_open: Callable[[int], bool] | None = None
    if faults is not None and faults.limits_availability:
        is_open = partial(_is_available, clients, faults, round)
    if sampling == "one_per_domain":
        groups = [_available(places, 1, is_open, rng) for places in clients.places_by_domain()]
        chosen = [group[int(rng.integers(len(group)))] for group in groups if len(group)]
    elif sampling == "poisson":
        chosen = _independent(range(len(clients)), wanted / len(clients), is_open, rng)
    else:
        places = _available(range(len(clients)), wanted, is_open, rng)
        few = wanted >= len(places)
        drawn = () if few else rng.choice(len(places), size=wanted, replace=False).tolist()
        chosen = list(places) if few else [places[i] for i in drawn]
    return tuple(clients.names[place] for place in sorted(chosen))


def usual_size(clients: ClientTable, wanted: int, sampling: Sampling) -> int:
    """Number of clients in a round where all are available; with poisson, the expected number.

    Args:
        clients: The clients.
        wanted: Number of clients in a cohort (`clients_per_round`); not used by one_per_domain.
        sampling: How the cohort is drawn.
    """
    if sampling == "one_per_domain":
        return sum(len(places) > 0 for places in clients.places_by_domain())
    return wanted


def _independent(
    places: range, rate: float, is_open: Callable[[int], bool] | None, rng: np.random.Generator
) -> list[int]:
    """Each available one of these clients with this probability; of very many, only those are asked."""
    there: Sequence[int] = places
    if is_open is not None and len(places) < MANY:
        there = [place for place in places if is_open(place)]
    drawn = [there[i] for i in np.flatnonzero(rng.random(len(there)) < rate).tolist()]
    return drawn if is_open is None or there is not places else list(filter(is_open, drawn))


def _is_available(clients: ClientTable, faults: Faults, round: int, place: int) -> bool:
    return faults.is_available(round, clients.names[place])


def _available(
    places: range, wanted: int, is_open: Callable[[int], bool] | None, rng: np.random.Generator
) -> Sequence[int]:
    """The available ones among these clients; of very many, the first `wanted` ones in a random order."""
    if is_open is None:
        return places
    if len(places) < MANY:
        return [place for place in places if is_open(place)]
    available: list[int] = []
    asked: set[int] = set()
    while len(available) < wanted and 2 * len(asked) < len(places):
        place = places[int(rng.integers(len(places)))]
        if place not in asked:
            asked.add(place)
            available += [place] if is_open(place) else []
    if len(available) < wanted:  # few are available: ask all the others, too
        others = rng.permutation([place for place in places if place not in asked]).tolist()
        available += islice(filter(is_open, others), wanted - len(available))
    return available
