"""Draws candidates by their numbers of examples, and of these the clients with the highest loss.

Cho et al., Client Selection in Federated Learning: Convergence Analysis and Power-of-Choice Selection
Strategies, 2020 [cho2020powerofchoice], where the rule is called pi_pow-d.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from rayfed.errors import ConfigError
from rayfed.sampling.base import Candidates


@dataclass(frozen=True, kw_only=True)
class PowerOfChoice:
    """Draws the clients with the highest loss among some candidates, who are sent the model for it.

    Attributes:
        candidates: Number of candidates (d in the paper) for each client that is drawn, at least 1; with 1
            clients are drawn by their numbers of examples alone.
    """

    candidates: float = 2.0

    def __post_init__(self) -> None:
        if not self.candidates >= 1:
            raise ConfigError(f"sampling: candidates={self.candidates!r} is not a number of at least 1")

    def __call__(self, round: int, clients: Candidates, rng: np.random.Generator) -> Collection[str]:
        """Ids of the drawn clients; arguments as of `rayfed.sampling.base.Rule`."""
        there = clients.available
        sizes = np.array([clients[one].num_examples for one in there], dtype=np.float64)
        count = min(int(self.candidates * clients.wanted), int(np.count_nonzero(sizes)))
        if not count:
            return []
        asked = [there[i] for i in rng.choice(len(there), count, replace=False, p=sizes / sizes.sum())]
        losses = clients.losses(asked)
        # A loss that is no number comes last; of equal losses the client that comes first is drawn.
        return sorted(losses, key=lambda one: (math.isnan(losses[one]), -losses[one]))[: clients.wanted]


draw = PowerOfChoice()
