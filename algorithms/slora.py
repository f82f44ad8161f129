"""SLoRA: some rounds of sparse tuning find the start values of LoRA adapters, which are then trained.

Babakniya et al., SLoRA: Federated Parameter Efficient Fine-Tuning of Language Models, 2023
[babakniya2023slora]. In the first stage clients train the entries of a sparse matrix S that is added to each
adapted weight, and the server averages them. Then the server splits what was learned by singular values, B A
being the best approximation of S of the rank of the adapters, sets S to 0, and clients train A and B.

The paper is not in our copy: this follows its abstract and public summaries. They name a density of about
1 %, but not how many rounds the first stage has, which numbers of the network it trains, and how singular
values are divided between B and A. Half of the rounds are the first stage, and B has the singular values, as
in FedLLM-Factory's code, where SLoRA is a baseline of other methods. Here the first stage trains adapted
layers only; with `tuning.density=1` it is full tuning of these layers. The places of S are the same in each
experiment, and S is multiplied by alpha / rank, as B A is. The head is trained in both.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt, Le

from algorithms._lora import LoraServer
from algorithms._partial import partial_step
from rayfed import Broadcast, Client, Cohort, Knob, Local, Method, ServerState, Update
from rayfed.errors import ConfigError
from rayfed.federation.aggregation import A, B, refactor
from rayfed.models.backbone import Backbone
from rayfed.tuning.lora import SPARSE, dense, use_sparse
from rayfed.types import Batch, Params

STAGE = "stage"
"""Name in `shared` of the number of the stage, 1 or 2."""


def at_rest(stage: int) -> tuple[str, ...]:
    """Ends of the names of tensors that are neither trained nor sent in a stage."""
    return (f".{A}", f".{B}") if stage == 1 else (SPARSE,)


@dataclass(frozen=True)
class TwoStages(LoraServer):
    """Server that averages sparse matrices, and makes adapters of them after the first stage.

    Attributes:
        sparse_share: Share of the rounds that are the first stage, rounded down; 1 at least, after which
            a run of one round ends. Short runs need a smaller one, such as 0.2.
    """

    sparse_share: Annotated[float, Gt(0), Le(0.5)] = 0.5

    offers: ClassVar[frozenset[str]] = frozenset({STAGE})
    tuning: ClassVar[Mapping[str, object]] = {"sparse": True}

    sent_tensors_only: ClassVar[bool] = True

    def start(self, params: Params) -> ServerState:
        return super().start(params).share(**{STAGE: 1})

    def send(self, state: ServerState, cohort: Cohort) -> Mapping[str, Broadcast]:
        rests = at_rest(state.shared[STAGE])
        sent = {name: value for name, value in state.params.items() if not name.endswith(rests)}
        return {cid: state.broadcast(sent, blocks=cohort.prefix(cid)) for cid in cohort.ids}

    def aggregate(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> ServerState:
        state = super().aggregate(state, cohort, updates)
        if state.shared[STAGE] == 2 or state.round + 1 < sparse_rounds(self.sparse_share, cohort.rounds):
            return state
        return replace(state, params=split(state.params)).share(**{STAGE: 2})


def sparse_rounds(share: float, rounds: int) -> int:
    """Number of rounds of the first stage.

    Args:
        share: Share of the rounds, as of `TwoStages`.
        rounds: Number of all rounds.

    >>> sparse_rounds(0.5, 9), sparse_rounds(0.2, 6), sparse_rounds(0.5, 1)
    (4, 1, 1)
    """
    return max(1, int(share * rounds + 1e-9))


def split(params: Params) -> Params:
    """Values with the sparse matrix of each layer in its factors, as well as their rank allows."""
    found = dict(params)
    for name in (name for name in params if name.endswith(SPARSE)):
        a, b = (name.removesuffix(SPARSE) + f".{factor}" for factor in (A, B))
        rows, columns = len(params[b]), params[a].shape[1]
        matrix = dense(params[name].double(), rows, columns)
        new_b, new_a = refactor(matrix, torch.eye(columns, dtype=torch.float64), params[a])
        found |= {a: new_a.type_as(params[a]), b: new_b.type_as(params[b])}
        found[name] = torch.zeros_like(params[name])
    return found


@dataclass(frozen=True)
class Staged(Local):
    """Local training of the sparse matrices, or of the adapters."""

    needs: ClassVar[frozenset[str]] = frozenset({"lora", STAGE})
    changes_passes: ClassVar[bool] = True

    def check(self, model: Backbone) -> None:
        trained = {name for name, entry in model.tensors().items() if entry.is_trained}
        alone = [name for name in trained if name.endswith(f".{A}") and is_without(name, trained)]
        if alone or not any(name.endswith(f".{A}") for name in trained):
            raise ConfigError(
                "algorithm: slora needs adapters of linear layers with A and B trained; leave out "
                "tuning.freeze_a and tuning.core, and adapters of convolutions"
            )

    def prepare(self, client: Client, sent: Broadcast) -> None:
        use_sparse(client.model, sent.shared[STAGE] == 1)

    def train(self, client: Client, sent: Broadcast) -> Update:
        update = super().train(client, sent)
        rests = at_rest(sent.shared[STAGE])
        return client.update(params={n: v for n, v in update.params.items() if not n.endswith(rests)})

    def step(self, client: Client, sent: Broadcast, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
        rests = at_rest(sent.shared[STAGE])
        partial_step(self, client, sent, batch, optimizer, lambda name: not name.endswith(rests))


def is_without(name: str, trained: Collection[str]) -> bool:
    """Whether the adapter with this A has no sparse matrix among the trained tensors."""
    return name.removesuffix(f".{A}") + SPARSE not in trained


METHOD = Method(server=TwoStages, local=Staged, knob=Knob("server.sparse_share", 0.1, 0.5))
