"""TERM: clients with a larger loss get exponentially larger weights.

Li, Beirami, Sanjabi, Smith, Tilted Empirical Risk Minimization, ICLR 2021 [li2021term], section 2, at the
level of clients: weights proportional to p_k exp(t F_k), with the share p_k of the data and the loss F_k.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from algorithms._arrays import Array, like, to_numpy
from algorithms._losses import LossWeighted
from rayfed import Cohort, Knob, Method, ServerState, Update
from rayfed.federation.aggregation import mean_of_statistics
from rayfed.federation.params import without_statistics
from rayfed.types import Params

EMA = "tilt_normalizer"


@dataclass(frozen=True)
class TiltedServer(LossWeighted):
    """Server with exponentially tilted weights.

    Attributes:
        t: Tilt; 0 gives FedAvg, negative values favour clients with a small loss.
        rule: `tilted` normalizes the weights within the round; `official` is the step of the released code,
            which normalizes by a running mean over rounds and divides by the number of clients twice.
    """

    t: float = 0.1
    rule: Literal["tilted", "official"] = "tilted"

    def aggregate(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> ServerState:
        losses = self.losses(cohort, updates)
        if self.rule == "official":
            steps, ema = official_steps(losses, self.t, float(state.memory.get(EMA, 0.0)))
            self.record_weights(cohort, updates, steps.tolist())
            return replace(state, params=step_mean(state.params, updates, steps.tolist())).remember(
                **{EMA: ema}
            )
        counts = [1.0 if self.weighting == "uniform" else float(u.num_examples) for u in updates]
        weights = tilted_weights(losses, counts, self.t).tolist()
        self.record_weights(cohort, updates, weights)
        return self.average(state, updates, weights)


def tilted_weights(losses: Array, num_examples: Array, t: float) -> Array:
    """Weights proportional to n_k exp(t F_k), summing to 1; float64.

    Args:
        losses: Loss F_k of each client, shape (K,).
        num_examples: Number of examples n_k of each client, shape (K,).
        t: Tilt.

    Raises:
        ValueError: A loss is NaN or infinite.
    """
    tilt = t * to_numpy(losses)
    n = to_numpy(num_examples)
    if not np.isfinite(tilt).all():
        raise ValueError(f"losses {to_numpy(losses).tolist()} must be finite")
    raw = n * np.exp(tilt - tilt.max())
    return like(raw / raw.sum(), losses, num_examples)


def official_steps(losses: Array, t: float, ema: float) -> tuple[npt.NDArray[np.float64], float]:
    """Factors of the clients' updates in the released code, and the new value of its normalizer.

    Args:
        losses: Loss of each client, shape (K,).
        t: Tilt.
        ema: Running mean that normalizes the factors; 0 before the first round.
    """
    tilt = t * to_numpy(losses)
    raw = np.exp(tilt - tilt.max())
    ema = 0.5 * ema + 0.5 * float(raw.mean())
    return raw / (len(raw) * ema), ema


def step_mean(start: Params, updates: Sequence[Update], steps: Sequence[float]) -> Params:
    """Start + mean of step_k (trained_k - start) over the clients that hold a name, for each name.

    BatchNorm statistics are the unweighted mean over these clients instead.
    """
    params = {**start, **mean_of_statistics(updates)}
    for name, value in without_statistics(start).items():
        held = [k for k, update in enumerate(updates) if name in update.params]
        for k in held:
            params[name] = params[name] + (updates[k].params[name] - value) * (steps[k] / len(held))
    return params


METHOD = Method(server=TiltedServer, knob=Knob("server.t", 0.1, 5.0))
