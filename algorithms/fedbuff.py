"""FedBuff: asynchronous rounds; the server moves whenever K answers have arrived, and late ones count less.

Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022 [nguyen2022fedbuff],
Algorithm 1, with the weight 1 / sqrt(1 + s) for an answer that is s server updates late:
w + lr / K * sum_i (y_i - w_i) / sqrt(1 + s_i), where w_i is the model with which client i began.

Answers arrive in the order of the virtual clock (section `faults`), so results do not depend on how long the
computation of a client really takes. A round is one server update. `clients_per_round` clients train at the
same time; when one has answered, the next one of the round's cohort begins with the present model.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from algorithms._lora import check_own_rule
from rayfed import Broadcast, Cohort, Knob, Local, Method, Server, ServerState, Update, is_statistic
from rayfed.errors import NobodyAnsweredError
from rayfed.federation.cohort import TRAINING
from rayfed.seeds import generator
from rayfed.types import Count, NonNegative, Positive, cut_to_rank

log = logging.getLogger(__name__)

CallTiming: TypeAlias = dict[str, Any]
"""A client that trains: `client`, `version` (server updates before it began), `blocks` and, in virtual
seconds since the first round, `arrival`."""


@dataclass(frozen=True)
class FedBuff(Server):
    """Takes a step along the mean of the updates in its buffer.

    Attributes:
        weighting: Weight of a client in the mean; uniform in the paper.
        buffer: Number K of answers in a server update, 10 in the paper; fewer where fewer clients train.
            Answers that are lost count as arrived.
        lr: Step size; with 1 and no client late the new parameters are the mean of the clients' parameters.
        staleness_power: The weight of an answer that is s updates late is (1 + s) to the power of minus this.
    """

    weighting: Literal["data_size", "uniform"] = "uniform"
    buffer: Count = 10
    lr: Positive = 1.0
    staleness_power: NonNegative = 0.5

    def __post_init__(self) -> None:
        check_own_rule(self)

    def check(self, clients: int) -> None:
        """Warn where the buffer holds all that train at the same time; with one client none can be late."""
        if self.buffer >= clients > 1:
            log.warning(
                "server.buffer=%d is not below the %d clients of a round: no answer is late, and rounds are "
                "those of FedAvg with server.weighting=%s; set a smaller one, such as server.buffer=%d",
                self.buffer,
                clients,
                self.weighting,
                (clients + 1) // 2,
            )

    def answers(self, clients: int) -> int:
        return min(self.buffer, clients)

    def round(self, state: ServerState, cohort: Cohort, local: Local) -> ServerState:
        state = local.exchange(state, cohort)
        begun = state.virtual_time + cohort.ledger.seconds
        arrivals, training = self.arrivals(state, cohort, begun)
        kept = {**state.memory.get("versions", {}), state.round: _model(state)}
        sent = {v["client"]: _message(v, kept[v["version"]]) for v in arrivals}
        lasts = max(0.0, arrivals[-1]["arrival"] - begun)
        updates: Sequence[Update] = ()
        with suppress(NobodyAnsweredError):  # others may still be training: the next round goes on with them
            updates = cohort.of(sent).run(self.training_task(local), sent, tag=TRAINING, lasts=lasts)
        needed = {v["version"]: kept[v["version"]] for v in training}
        cohort.measure(training=float(len(training)), versions=float(len(needed)))
        _record(cohort, [(u, sent[u.client]) for u in updates])
        if updates:
            present = [self.rebase(state, sent[u.client], u) for u in updates]
            state = self.aggregate(state, cohort, present)
        return state.remember(training=training, versions=needed)

    def arrivals(
        self, state: ServerState, cohort: Cohort, begun: float
    ) -> tuple[list[CallTiming], list[CallTiming]]:
        """The visits that end in this round, in the order in which they do, and those that go on.

        Of two answers that arrive at the same time, that of the client that began first is taken first.

        Args:
            state: State before the round; its memory holds the visits that go on since earlier rounds.
            cohort: The cohort; clients that are still training do not begin anew.
            begun: Virtual seconds at which the round begins.
        """
        training: list[CallTiming] = list(state.memory.get("training", ()))
        busy = {v["client"] for v in training}
        order = generator(cohort.seed, "fedbuff", cohort.round).permutation(len(cohort.ids)).tolist()
        waiting = [cohort.ids[i] for i in reversed(order) if cohort.ids[i] not in busy]
        sent = self.send(state, cohort)
        visits: list[CallTiming] = []
        now = begun
        while len(visits) < self.buffer:
            while waiting and len(training) < len(cohort.ids):
                cid = waiting.pop()
                visit = {"client": cid, "version": state.round, "blocks": sent[cid].blocks}
                training.append({**visit, "arrival": now + cohort.seconds(cid, sent[cid])})
            if not training:
                break
            first = min(training, key=lambda v: float(v["arrival"]))
            training.remove(first)
            visits.append(first)
            now = max(now, first["arrival"])
        return visits, training

    def rebase(self, state: ServerState, sent: Broadcast, update: Update) -> Update:
        """An answer as if its client had begun with the present model; its change counts by its staleness."""
        late = state.round - sent.round
        if not late:
            return update
        weight = (1 + late) ** -self.staleness_power
        now = cut_to_rank(state.params, update.rank)
        then = cut_to_rank(sent.params, update.rank)
        params = {
            name: value if is_statistic(name) else now[name] + weight * (value - then[name])
            for name, value in update.params.items()  # a statistic of BatchNorm has no direction
        }
        return replace(update, params=params)

    def take_step(self, old: Tensor, mean: Tensor, memory: dict[str, Any]) -> Tensor:
        return torch.lerp(old, mean, self.lr)


def _model(state: ServerState) -> dict[str, Any]:
    """Message of clients that begin now; it is kept until the last of them has answered."""
    return {"params": state.params, "shared": dict(state.shared)}


def _message(visit: CallTiming, model: Mapping[str, Any]) -> Broadcast:
    return Broadcast(round=visit["version"], blocks=visit["blocks"], **model)


def _record(cohort: Cohort, answers: Sequence[tuple[Update, Broadcast]]) -> None:
    """Add every answer to the table `staleness`, and mean and largest staleness to the row of the round."""
    late = [cohort.round - sent.round for _, sent in answers]
    for (update, sent), s in zip(answers, late, strict=True):
        cohort.record("staleness", client=update.client, version=sent.round, staleness=s)
    cohort.measure(answers=float(len(late)))
    if late:
        cohort.measure(staleness=sum(late) / len(late), staleness_max=float(max(late)))


METHOD = Method(server=FedBuff, knob=Knob("server.lr", 0.1, 3.0))
