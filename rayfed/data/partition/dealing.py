"""Dealing samples: stratified choices and cuts of a domain into clients. Pure functions of a generator."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

MAX_TRIES = 100
"""Dirichlet draws before small clients are filled up from large ones."""


def stratified_order(strata: NDArray[np.int64], rng: np.random.Generator) -> Indices:
    """A random order of which every prefix holds each stratum in its share of the whole, to within about one.

    Args:
        strata: Stratum (a class, say) of each sample, shape (n,).
        rng: Source of the order.

    Returns:
        A permutation of 0..n-1, by place: sample i of the n_s in a stratum is at (i + u) / n_s, with one u in
        [0, 1) per stratum.
    """
    mixed = rng.permutation(len(strata))
    place = np.empty(len(strata))
    for stratum in np.unique(strata):
        members = mixed[strata[mixed] == stratum]
        place[members] = (np.arange(len(members)) + rng.random()) / len(members)
    return mixed[np.argsort(place[mixed], kind="stable")]


def deal_evenly(num_samples: int, num_parts: int, rng: np.random.Generator) -> list[Indices]:
    """Positions 0..n-1 dealt at random to parts whose sizes differ by at most one."""
    return [part.astype(np.int64) for part in np.array_split(rng.permutation(num_samples), num_parts)]


def deal_by_dirichlet(
    labels: NDArray[np.int64], num_parts: int, alpha: float, smallest: int, rng: np.random.Generator
) -> list[Indices]:
    """Positions dealt class by class in Dirichlet proportions, no part with fewer than `smallest`.

    The feature-and-label-skew setting of Su et al., FedRA, ECCV 2024, as in the authors' code: a part that
    already holds n / num_parts samples gets none of the next class, and a draw with a part that is too small
    is repeated. A Dirichlet vector with some entries set to zero and the rest rescaled is a Dirichlet vector
    of the rest, so only parts with room take part in a draw.

    Differs from the authors' code: after MAX_TRIES draws the best one is repaired by moving random samples
    from the largest parts, where theirs would repeat for ever.

    Args:
        labels: Class of each sample, shape (n,), n >= num_parts * smallest.
        num_parts: Number of parts.
        alpha: Concentration, > 0.
        smallest: Fewest samples of a part.
        rng: Source of everything.

    Raises:
        ValueError: There are too few samples.
    """
    if len(labels) < num_parts * smallest:
        raise ValueError(f"{len(labels)} samples cannot give {num_parts} parts at least {smallest} each")
    best: list[Indices] = []
    for _ in range(MAX_TRIES):
        parts = _draw(labels, num_parts, alpha, rng)
        if not best or min(map(len, parts)) > min(map(len, best)):
            best = parts
        if min(map(len, best)) >= smallest:
            break
    return _fill_up(best, smallest, rng)


def _draw(labels: NDArray[np.int64], num_parts: int, alpha: float, rng: np.random.Generator) -> list[Indices]:
    pieces: list[list[Indices]] = [[] for _ in range(num_parts)]
    sizes = np.zeros(num_parts, dtype=np.int64)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        room = np.flatnonzero(sizes * num_parts < len(labels))
        shares = rng.dirichlet(np.full(len(room), alpha))
        cuts = np.floor(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        for part, piece in zip(room, np.split(members, cuts), strict=True):
            pieces[part].append(piece)
            sizes[part] += len(piece)
    return [np.concatenate(piece) if piece else np.empty(0, dtype=np.int64) for piece in pieces]


def _fill_up(parts: list[Indices], smallest: int, rng: np.random.Generator) -> list[Indices]:
    """Move random samples from the largest part to the smallest until none is too small.

    Ends: each step fills a part or brings the largest down to `smallest`, and n >= num_parts * smallest says
    that some part has more than `smallest` as long as another has less.
    """
    parts = list(parts)
    while True:
        sizes = [len(part) for part in parts]
        poor, rich = int(np.argmin(sizes)), int(np.argmax(sizes))
        if sizes[poor] >= smallest:
            return parts
        moved = min(smallest - sizes[poor], sizes[rich] - smallest)
        mixed = rng.permutation(parts[rich])
        parts[rich], parts[poor] = mixed[moved:], np.concatenate([parts[poor], mixed[:moved]])
