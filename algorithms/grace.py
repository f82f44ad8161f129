"""GRACE: weights that grow with the agreement of clients' updates, and local meta-learning with alignment.

Zhang et al., GRACE: A Generalized and Personalized Federated Learning Method for Medical Imaging, MICCAI 2023
[zhang2023grace], section 2, according to its released code: first-order meta-updates with CORAL at the
client, and weights by the mean cosine of a client's update with those of the others on the server.

Differs from the code: all BatchNorm statistics are averaged with the new weights; the code does so only for
layers whose name contains bn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from algorithms._arrays import Array, like, to_numpy
from algorithms.bgp import MetaLocal
from rayfed import Cohort, Knob, Method, Server, ServerState, Update, is_statistic

SHIFT = 1e-3
"""Smallest mean cosine after the shift that makes all of them positive."""


@dataclass(frozen=True)
class GradientCorrection(Server):
    """FedAvg whose weights grow with the mean cosine of a client's update with those of the others."""

    def aggregate(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> ServerState:
        names = [n for n in state.params if all(n in u.params for u in updates) and not is_statistic(n)]
        moves = [
            np.concatenate([to_numpy(state.params[n] - u.params[n]).ravel() for n in names]) for u in updates
        ]
        weights = consistent_weights(moves, self.base_weights(updates)).tolist()
        self.record_weights(cohort, updates, weights)
        return self.average(state, updates, weights)


def consistent_weights(moves: Sequence[Array], weights: Array) -> Array:
    """Weights times the mean cosine of a client's update with those of the others, scaled to sum 1.

    Where a mean cosine is negative, all are shifted so that the smallest is SHIFT. An update of norm zero has
    cosine 0 with all others. With one client, or where all products are zero, the weights are unchanged.

    Args:
        moves: Received minus trained parameters of each client, flattened to one dimension.
        weights: Weights of the clients, summing to 1.
    """
    rows = np.stack([to_numpy(move) for move in moves])
    p = to_numpy(weights)
    if len(rows) < 2:
        return like(p, weights)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    rows = np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)
    cosines = rows @ rows.T
    c = (cosines.sum(1) - np.diag(cosines)) / (len(rows) - 1)
    if c.min() < 0:
        c = c - c.min() + SHIFT
    if c.max() > 1:
        c = c / c.max()
    q = c * p
    return like(q / q.sum() if q.sum() > 0 else p, weights)


@dataclass(frozen=True)
class ClientCorrection(MetaLocal):
    """First-order meta-updates on the two halves of each batch, with alignment on the second half."""

    meta_update: Literal["sequential", "fo_restore", "second_order", "none"] = "fo_restore"
    meta_batch: Literal["fresh", "half"] = "half"


METHOD = Method(server=GradientCorrection, local=ClientCorrection, knob=Knob("local.align_weight", 0.1, 10.0))
