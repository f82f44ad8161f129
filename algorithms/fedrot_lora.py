"""FedRot-LoRA: turns the factors of the clients' LoRA adapters towards the global ones before the mean.

Zhang et al., FedRot-LoRA: Mitigating Rotational Misalignment in Federated LoRA, ICML 2026
[zhang2026fedrotlora]. With an orthogonal R, (B R)(R^T A) = B A, so that equal updates may have other factors.
The rotation R of a client is the one for which R^T A is nearest to the A that it received, in the next round
the one for which B R is nearest to the B, in alternation. The mean is that of all R^T A and of all B R.

The paper is not in our copy: this follows its abstract and the released code. As there, nothing is turned in
the first round, where B was zero, and A is the measure in rounds 1, 3, 5, ... counted from 0. In the code the
soft rotation (`lam` below 1) has determinant 1. The hard one, its default, may reflect, too: this is
`server.lam=1 server.reflect=true`. The default of `server.lam` is our choice; Yi et al. [yi2026cflora] took
0.4. Of equally near rotations it is the one nearest to the identity. A client of rank k has its k components
turned.

Differs from the code: the server turns the factors, which changes no result and no traffic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from algorithms._lora import LoraServer
from rayfed import Knob, Local, Method, ServerState, Update
from rayfed.errors import ConfigError
from rayfed.federation.aggregation import RELATIVE_ZERO, A, B
from rayfed.models.backbone import Backbone
from rayfed.types import Fraction, Params, rank_axes


@dataclass(frozen=True)
class Rotating(LoraServer):
    """Server that rotates the factors of each client, and averages them.

    Attributes:
        lam: Strength of the alignment: the rotation is the one nearest to (1 - lam) I + lam R; 0 is FedIT.
        reflect: R is the nearest orthogonal matrix, whose determinant may be -1: a client's factors are then
            as near to the global ones as they can be. Only with `lam` 1.
    """

    lam: Fraction = 1.0
    reflect: bool = False

    sent_tensors_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.reflect and self.lam < 1:
            raise ConfigError(
                f"server.reflect: true cannot be used with server.lam={self.lam:g}: between the identity and "
                f"a reflection there is no rotation; set server.lam=1"
            )

    def average(self, state: ServerState, updates: Sequence[Update], weights: Sequence[float]) -> ServerState:
        if state.round and self.lam:
            measure = A if state.round % 2 else B
            turned = [
                aligned(one.params, state.params, measure, self.lam, one.rank, self.reflect)
                for one in updates
            ]
            updates = [
                replace(one, params={**one.params, **factors})
                for one, factors in zip(updates, turned, strict=True)
            ]
        return super().average(state, updates, weights)


@dataclass(frozen=True)
class BothFactors(Local):
    """Local training of adapters whose factors are both trained."""

    needs: ClassVar[frozenset[str]] = frozenset({"lora"})

    def check(self, model: Backbone) -> None:
        trained = {name for name, entry in model.tensors().items() if entry.is_trained}
        if not any(name.endswith(f".{A}") for name in trained):
            raise ConfigError(
                "algorithm: fedrot_lora turns A and B of the same adapter, but this tuning keeps A at its "
                "start value; leave out tuning.freeze_a and tuning.core"
            )


def aligned(
    params: Mapping[str, Tensor],
    received: Mapping[str, Tensor],
    measure: str,
    lam: float,
    rank: int | None,
    reflect: bool = False,
) -> Params:
    """Rotated factors of every adapter of which both are there, by name.

    Args:
        params: Trained values.
        received: The values with which training began.
        measure: The factor that is brought near to the received one, `A` or `B`.
        lam: Strength of the alignment.
        rank: Rank of the client's adapters; None: that of the tuning.
        reflect: As of `Rotating`.
    """
    result: Params = {}
    for name in (name for name in params if name.endswith(f".{A}")):
        other = name.removesuffix(A) + B
        if other not in params:
            continue
        a, b = (components(key, params[key], rank) for key in (name, other))
        key, value = (name, a) if measure == A else (other, b)
        turn = nearest_rotation(value @ components(key, received[key], rank).T, reflect)
        if lam < 1:
            turn = nearest_rotation(
                torch.eye(len(turn), dtype=turn.dtype, device=turn.device).lerp(turn, lam)
            )
        for key, rows in ((name, a), (other, b)):
            (axis,) = rank_axes(key)
            moved = params[key].movedim(axis, 0).clone()
            moved[: len(rows)] = (turn.T @ rows).type_as(moved).view_as(moved[: len(rows)])
            result[key] = moved.movedim(0, axis).contiguous()
    return result


def components(name: str, factor: Tensor, rank: int | None) -> Tensor:
    """The components of a factor that a client of this rank holds, as rows; float64."""
    (axis,) = rank_axes(name)
    return factor.movedim(axis, 0)[:rank].flatten(1).double()


def nearest_rotation(product: Tensor, reflect: bool = False) -> Tensor:
    """The rotation R with the largest trace of R^T M, and so with the smallest |X - R Y| where M = X Y^T.

    Args:
        product: M, shape (r, r), float64. Directions with singular value 0 leave R open.
        reflect: R may have determinant -1, where this gives a larger trace.

    Returns:
        R, of determinant 1 unless it may reflect, shape (r, r); where M leaves it open, as near to the
        identity as possible.
    """
    u, s, vt = torch.linalg.svd(product)
    known = s > RELATIVE_ZERO * s[0]
    free, own = u[:, ~known], vt[~known]
    p, _, q = torch.linalg.svd(free.T @ own.T)
    turn = u @ torch.cat([vt[known], p @ q @ own])
    if torch.linalg.det(turn) > 0 or reflect:
        return turn
    last = q if len(q) else vt  # the direction whose reversal costs least
    last[-1] = -last[-1]
    return u @ torch.cat([vt[known], p @ q @ own])


METHOD = Method(server=Rotating, local=BothFactors, knob=Knob("server.lam", 0.1, 1.0))
