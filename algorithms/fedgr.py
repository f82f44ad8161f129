"""FedGR: clients are grouped, and weights follow the losses of clients and of their groups.

Gong et al., FedGCR, AAAI 2024, section "Group reweighting", Eq. 3 and 5; the authors' ablation "FedGR only".
Works under any local half and any tuning.

Differs from the paper: the weights are normalised (Algorithm 1, line 8, leaves that out) and the loss is the
mean over the client's images of the received model's cross entropy, not a sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import numpy as np
from annotated_types import Ge

from algorithms._arrays import Array, like, to_numpy
from algorithms._grouping import GroupingServer
from algorithms._losses import checked
from rayfed.federation.cohort import Cohort
from rayfed.federation.method import Method
from rayfed.types import Fraction, Update

GroupMean: TypeAlias = Literal["simple", "data"]


@dataclass(frozen=True)
class GroupReweighting(GroupingServer):
    """Group-reweighted averaging.

    Attributes:
        delta: Final share of the group's loss in the exponent; 0: every client's own loss only.
        gamma: How slowly that share grows.
        q: A weight is the loss to the power q + 1: -1 is FedAvg.
        group_mean: Loss of a group: plain mean over its clients, or weighted by their data.
        beta_start: Round from which the share is counted: 1 gives 0 in the first round (the paper), 0 gives
            delta (1 - gamma) (the authors' code).
        first_losses: In the first round: the losses, or 1 for everybody (the authors' code).
        quantize: Replace a loss L by 100 / int(100 / L), as the authors' code does.
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
            losses = [quantized(loss) for loss in losses]
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
    """Aggregation weights n_k (L_k^(1 - beta) G_k^beta)^(q + 1), normalised; float64. FedGCR, Eq. 3.

    Args:
        num_examples: Of each client, shape (K,).
        losses: Of each client; below 1e-10 they count as that.
        clusters: Group of each client, any whole numbers.
        beta: Share of the group's loss G_k.
        q: Exponent; -1 gives FedAvg's weights exactly.
        group_mean: How G_k is the mean over its clients: plain, or weighted by num_examples.

    Raises:
        ValueError: A loss is NaN, infinite or negative.
    """
    n, own, labels = to_numpy(num_examples), checked(losses), to_numpy(clusters)
    own = own / own.max()  # the weights do not depend on the scale, and large losses must not overflow
    count = n if group_mean == "data" else np.ones_like(n)
    group = np.empty_like(own)
    for label in np.unique(labels):
        members = labels == label
        group[members] = np.average(own[members], weights=count[members])
    raw = n * (own ** (1 - beta) * group**beta) ** (q + 1)
    return like(raw / raw.sum(), num_examples, losses, clusters)


def quantized(loss: float) -> float:
    """100 / int(100 / loss); a loss above 100 counts as 100, where the authors' code divides by zero."""
    return 100 / max(int(100 / loss), 1)


METHOD = Method(server=GroupReweighting)
