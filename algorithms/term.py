"""TERM: clients with a larger loss get exponentially larger weights.

Li, Beirami, Sanjabi, Smith, Tilted Empirical Risk Minimization, ICLR 2021, section 2, client level: weights
proportional to p_k exp(t F_k).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from algorithms._arrays import Array, like, to_numpy
from algorithms._losses import LossWeighted
from rayfed.federation.cohort import Cohort
from rayfed.federation.method import Method
from rayfed.types import Params, ServerState, Update

EMA = "tilt_normalizer"


@dataclass(frozen=True)
class TiltedServer(LossWeighted):
    """Tilted averaging.

    Attributes:
        t: Tilt; 0 is FedAvg, negative values favour clients with a small loss.
        rule: `tilted` normalises the weights within the round; `official` takes the steps of the released
            code, whose normaliser is a running mean over the rounds and which divides by the number of
            clients twice.
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
    """Weights n_k exp(t F_k), normalised; float64.

    Raises:
        ValueError: A loss is NaN or infinite.
    """
    tilt, n = t * to_numpy(losses), to_numpy(num_examples)
    if not np.isfinite(tilt).all():
        raise ValueError(f"losses {to_numpy(losses).tolist()} must be finite")
    raw = n * np.exp(tilt - tilt.max())
    return like(raw / raw.sum(), losses, num_examples)


def official_steps(losses: Array, t: float, ema: float) -> tuple[npt.NDArray[np.float64], float]:
    """Step multipliers of the released code and its new normaliser, which starts at 0."""
    tilt = t * to_numpy(losses)
    raw = np.exp(tilt - tilt.max())
    ema = 0.5 * ema + 0.5 * float(raw.mean())
    return raw / (len(raw) * ema), ema


def step_mean(start: Params, updates: Sequence[Update], steps: Sequence[float]) -> Params:
    """Start + the mean over holders of step_k (trained_k - start), per name."""
    params = dict(start)
    for name, value in start.items():
        held = [k for k, update in enumerate(updates) if name in update.params]
        for k in held:
            params[name] = params[name] + (updates[k].params[name] - value) * (steps[k] / len(held))
    return params


METHOD = Method(server=TiltedServer)
