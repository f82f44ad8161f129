"""FedGR: aggregation weights that grow with the loss of a client and of its group.

Cheng, Yeh, Chen, Pastor, Chen, FedGCR, AAAI 2024 [cheng2024fedgcr], section 3.2, Eq. 3 and 5; the row FedGR
of Table 5. It can be combined with any local half and tuning.

Differs from the paper: the weights are normalized, which Algorithm 1, line 8, leaves out; the loss is the
mean, not the sum, of the received model's cross entropy over the client's examples (`loss=accumulated` gives
that of Algorithm 1); the representation is that of the received model (`rep_model=local` gives that of
Algorithm 1, line 15); and Eq. 4 is a mean over the classes that a client has, as in the authors' code, not
over all classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import numpy as np
from annotated_types import Ge

from algorithms._arrays import Array, like, to_numpy
from algorithms._grouping import GroupingServer
from algorithms._losses import check_losses
from rayfed import Cohort, Knob, Method, Update
from rayfed.types import Fraction

GroupMean: TypeAlias = Literal["simple", "data"]


@dataclass(frozen=True)
class GroupReweighting(GroupingServer):
    """Server that weights clients by their own losses and those of their groups.

    Attributes:
        delta: Limit of the share of the group's loss in the exponent; 0: only the client's own loss counts.
        gamma: Factor per round by which the share approaches its limit; larger is slower.
        q: Weights are proportional to the loss to the power q + 1; -1 gives FedAvg.
        group_mean: Loss of a group: mean over its clients, unweighted or weighted by numbers of examples.
        beta_start: 1: the share is 0 in the first round (the paper); 0: it is delta (1 - gamma) (the authors'
            code).
        first_losses: Losses in the first round: as measured, or 1 for all clients (the authors' code).
        quantize: Replace a loss L by 100 / int(100 / L), as in the authors' code.
    """

    delta: Fraction = 0.5
    gamma: Fraction = 0.5
    q: Annotated[float, Ge(-1)] = 1.0
    group_mean: GroupMean = "simple"
    beta_start: Literal[0, 1] = 1
    first_losses: Literal["measured", "ones"] = "measured"
    quantize: bool = False

    def weigh(
        self, cohort: Cohort, updates: Sequence[Update], losses: Sequence[float], groups: Sequence[int]
    ) -> list[float]:
        share = beta(cohort.round + 2 - self.beta_start, self.delta, self.gamma)
        if self.first_losses == "ones" and cohort.round == 0:
            losses = [1.0] * len(losses)
        elif self.quantize:
            losses = [quantize_loss(loss) for loss in losses]
        counts = [1.0 if self.weighting == "uniform" else float(u.num_examples) for u in updates]
        cohort.measure(beta=share)
        weights: list[float] = group_weights(counts, losses, groups, share, self.q, self.group_mean).tolist()
        return weights


def beta(round: int, delta: float, gamma: float) -> float:
    """Share of the group's loss in round 1, 2, ...: delta (1 - gamma^(round - 1)); FedGCR, Eq. 5."""
    return delta * (1 - gamma ** (round - 1))


def group_weights(
    num_examples: Array,
    losses: Array,
    clusters: Array,
    beta: float,
    q: float,
    group_mean: GroupMean = "simple",
) -> Array:
    """Aggregation weights n_k (L_k^(1 - beta) G_k^beta)^(q + 1), normalized; float64. FedGCR, Eq. 3.

    Args:
        num_examples: Number of examples of each client, shape (K,).
        losses: Loss of each client, shape (K,); losses below 1e-10 are replaced by 1e-10.
        clusters: Group of each client, whole numbers, shape (K,).
        beta: Share of the group's loss G_k.
        q: Exponent; -1 gives FedAvg's weights exactly.
        group_mean: Mean over clients that gives G_k: unweighted, or weighted by `num_examples`.

    Raises:
        ValueError: A loss is NaN, infinite or negative.
    """
    n = to_numpy(num_examples)
    own = check_losses(losses)
    labels = to_numpy(clusters)
    own = own / own.max()  # avoids overflow of large losses; the weights do not depend on the scale
    count = n if group_mean == "data" else np.ones_like(n)
    group = np.empty_like(own)
    for label in np.unique(labels):
        members = labels == label
        group[members] = np.average(own[members], weights=count[members])
    raw = n * (own ** (1 - beta) * group**beta) ** (q + 1)
    return like(raw / raw.sum(), num_examples, losses, clusters)


def quantize_loss(loss: float) -> float:
    """100 / int(100 / loss). A loss above 100 gives 100; the authors' code divides by zero there."""
    return 100 / max(int(100 / loss), 1)


METHOD = Method(server=GroupReweighting, knob=Knob("server.delta", 0.1, 0.9))
