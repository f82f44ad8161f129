"""LoRA-A2: trains B of LoRA adapters in one round and A in the next, only the components that matter most.

Koo et al., Towards Robust and Efficient Federated Low-Rank Adaptation with Heterogeneous Clients, ACL 2025
[koo2025loraa2]. A client first trains one pass for trial. The score of component i of an adapter is then the
Frobenius norm |dB[:, i] A[i, :]| where A rests, or |B[:, i] dA[i, :]| where B rests (its Eq. 4). It puts the
received values back, trains the `local.budget` N components with the largest scores, of all those in its N
adapters, and sends these only. The server adds the mean of the changes.

B has five times the rate of A, as in the paper (its Appendix B). There global adapters have rank 16, and the
head is frozen: `tuning.rank=16 head=frozen`. A head that trains has `train.lr`. With a budget of at least the
rank and `local.b_rate=1` it is RoLoRA. `channel` and attacks on values are refused.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor

from algorithms._lora import LoraServer
from algorithms.rolora import at_rest
from rayfed import Broadcast, Client, Knob, Local, Method, ServerState, Update
from rayfed.devices import move, numbers
from rayfed.federation.aggregation import A, B
from rayfed.types import Batch, Count, Params, Positive, rank_axes

PLACES, VALUES = "places", "values"
"""Names in `extra` of the components that a client sends, by name of the tensor: their places and values."""


@dataclass(frozen=True)
class SparseMean(LoraServer):
    """Server that averages factors of which each client sent some components."""

    def average(self, state: ServerState, updates: Sequence[Update], weights: Sequence[float]) -> ServerState:
        return super().average(state, [whole(state.params, update) for update in updates], weights)


def whole(params: Mapping[str, Tensor], update: Update) -> Update:
    """The answer with whole factors: components that a client did not send have their values of `params`."""
    filled: Params = {}
    for name, places in update.extra[PLACES].items():
        filled[name] = params[name].clone()
        filled[name].index_copy_(rank_axes(name)[0], places, update.extra[VALUES][name])
    return replace(update, params={**update.params, **filled})


@dataclass(frozen=True)
class AlternatingSelection(Local):
    """Local training of the most important components of one factor.

    Attributes:
        budget: Components that are trained and sent, as a mean over the adapters of the client.
        b_rate: Learning rate of B as a multiple of that of A, which is `train.lr`.
    """

    budget: Count = 4
    b_rate: Positive = 5.0

    needs: ClassVar[frozenset[str]] = frozenset({"lora"})
    trained_in_extra: ClassVar[bool] = True

    def train(self, client: Client, sent: Broadcast) -> Update:
        rests = at_rest(sent.round)
        before = client.params()
        factors = [n for n in client.trainable() if rank_axes(n) and not n.endswith(rests)]
        chosen = {n: torch.arange(before[n].shape[rank_axes(n)[0]]) for n in factors}
        if self.budget * len(factors) < sum(map(len, chosen.values())):
            chosen = self.most_important(client, sent, before, factors)
        masks = move(
            {name: mask_of(name, before[name], rows) for name, rows in chosen.items()}, client.device
        )
        optimizer = self.optimizer(client)
        for batch in client.batches():
            self.masked_step(client, sent, batch, optimizer, before, masks)
        after = client.params()
        places = {name: rows for name, rows in chosen.items() if len(rows)}
        there = move(places, client.device)
        values = {n: after[n].index_select(rank_axes(n)[0], there[n]) for n in places}
        rest = {name: value for name, value in after.items() if not rank_axes(name)}
        return client.update(params=rest, extra={PLACES: places, VALUES: values})

    def optimizer(self, client: Client) -> torch.optim.Optimizer:
        """The optimizer of a client, in which B has its rate."""
        optimizer = client.optimizer()
        factors = {id(value) for name, value in client.trainable().items() if name.endswith(f".{B}")}
        if factors and self.b_rate != 1:
            optimizer.param_groups[:] = [
                part
                for group in optimizer.param_groups
                for part in divided(group, factors, self.b_rate * float(group["lr"]))
            ]
        return optimizer

    def most_important(
        self, client: Client, sent: Broadcast, before: Params, factors: Sequence[str]
    ) -> dict[str, Tensor]:
        """Numbers of the chosen components of each factor, after a pass for trial, which is undone."""
        optimizer = self.optimizer(client)
        one_pass = client.config.batches(client.data.size("train")) if client.num_steps() else 0
        for batch in islice(client.batches(), one_pass):
            self.masked_step(client, sent, batch, optimizer, before, {})
        after = client.params()
        client.load(before)
        return select({n: scores(n, before, after) for n in factors}, self.budget * len(factors))

    def masked_step(
        self,
        client: Client,
        sent: Broadcast,
        batch: Batch,
        optimizer: torch.optim.Optimizer,
        before: Params,
        masks: Mapping[str, Tensor],
    ) -> None:
        """One optimization step that moves what the masks have, and no factor that rests.

        Args:
            sent: Message from the server.
            batch: Inputs and targets.
            optimizer: The optimizer of `client`.
            before: The received values.
            masks: Components that may move, by name of a factor (`mask_of`); other tensors move freely.
        """
        live, rests = client.trainable(), at_rest(sent.round)
        optimizer.zero_grad()
        client.backward(partial(self.loss, client, sent), batch)
        for name, parameter in live.items():
            if name.endswith(rests):
                parameter.grad = None
            elif name in masks and parameter.grad is not None:
                parameter.grad.mul_(masks[name])
        client.clip_gradients()
        optimizer.step()
        for name, mask in masks.items():
            keep_only(live[name], mask, before[name])  # from which weight decay would move the others


def divided(group: Mapping[str, Any], chosen: Collection[int], rate: float) -> list[dict[str, Any]]:
    """A group of parameters of an optimizer as two, of which those with a chosen `id` have another rate."""
    parts = {
        group["lr"]: [value for value in group["params"] if id(value) not in chosen],
        rate: [value for value in group["params"] if id(value) in chosen],
    }
    return [{**group, "params": values, "lr": lr} for lr, values in parts.items() if values]


def scores(name: str, before: Params, after: Params) -> Tensor:
    """|dB[:, i] A[i, :]| or |B[:, i] dA[i, :]| of every component i: the product of two norms, shape (r,)."""
    other = name.removesuffix(A) + B if name.endswith(A) else name.removesuffix(B) + A
    (axis,), (across,) = rank_axes(name), rank_axes(other)
    change = (after[name] - before[name]).movedim(axis, 0).flatten(1)
    return change.norm(dim=1) * before[other].movedim(across, 0).flatten(1).norm(dim=1)


def select(scores: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """Numbers of the components with the largest scores among all factors, in ascending order, int64.

    Args:
        scores: Scores of the components of each factor, shape (r,).
        number: How many components to choose; of equal scores the first ones.
    """
    joined = torch.tensor(numbers([score for value in scores.values() for score in value]))
    order = joined.argsort(descending=True, stable=True)[:number]
    mask = torch.zeros(len(joined), dtype=torch.bool)
    mask[order] = True
    parts = mask.split([len(value) for value in scores.values()])
    return {name: part.nonzero()[:, 0] for name, part in zip(scores, parts, strict=True)}


def mask_of(name: str, value: Tensor, rows: Tensor) -> Tensor:
    """Whether a component is among some, of a shape that can be multiplied with the factor of this name."""
    (axis,) = rank_axes(name)
    mask = torch.zeros([n if i == axis else 1 for i, n in enumerate(value.shape)], dtype=torch.bool)
    return mask.index_fill_(axis, rows, True)


@torch.no_grad()
def keep_only(value: Tensor, mask: Tensor, other: Tensor) -> None:
    """Give a tensor the values of another one wherever the mask is false, in place."""
    value.copy_(torch.where(mask, value, other))


METHOD = Method(server=SparseMean, local=AlternatingSelection, knob=Knob("local.budget", 1, 8))
