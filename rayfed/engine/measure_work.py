"""Measures the work of a method's rounds by a few small visits in this process, before a run.

Some methods take two batches for a step, train two models from the second round on, or end a round before
all clients have answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean

import torch

from rayfed.client_facts import ClientTable
from rayfed.devices import HOST, settings_restored
from rayfed.engine.loop import RoundPlan, cohort_of
from rayfed.engine.setup import Setup
from rayfed.executors.inline import InlineExecutor
from rayfed.executors.worker import ClientContext, Weights
from rayfed.federation.cohort import TRAINING, Cost, Ledger
from rayfed.federation.executor import Call, Policy
from rayfed.federation.train_config import TrainConfig
from rayfed.types import Update

ROUNDS = 3
"""Rounds that are tried; the mean of those after the first one counts, as some methods alternate."""
MOST_KINDS = 6
"""Most clients that are tried, one of each capacity."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The cost of a round, or of several, for all clients together.

    Attributes:
        steps: Training batches.
        examples: Examples in them.
        flops: Floating-point operations of training; None: they cannot be counted for this model.
        bytes: Bytes sent and received.
    """

    steps: float = 0.0
    examples: float = 0.0
    flops: float | None = 0.0
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        known = self.flops is not None and other.flops is not None
        return Work(
            steps=self.steps + other.steps,
            examples=self.examples + other.examples,
            flops=(self.flops or 0.0) + (other.flops or 0.0) if known else None,
            bytes=self.bytes + other.bytes,
        )

    def times(self, factor: float) -> Work:
        """So many times this work."""
        flops = None if self.flops is None else self.flops * factor
        return Work(
            steps=self.steps * factor,
            examples=self.examples * factor,
            flops=flops,
            bytes=self.bytes * factor,
        )


@dataclass
class _Visits:
    """The visits of a client in a round: batches, rows in them, and operations of a batch and of a row."""

    steps: int = 0
    rows: int = 0
    trained_steps: int = 0
    trained_rows: int = 0
    of_step: int = 0
    of_row: int = 0

    def add(self, call: Call, update: Update, cost: Cost | None) -> None:
        self.steps += update.steps
        self.rows += update.rows
        if call.tag == TRAINING and cost is not None:
            self.trained_steps += update.steps
            self.trained_rows += update.rows
            self.of_step, self.of_row = (cost.of_visit(call.sent, *one)[0] for one in ((1, 0), (0, 1)))


class _Counting(InlineExecutor):
    """Runs calls in this process, and counts what the visits of each client cost."""

    def __init__(self, context: ClientContext, weights: Weights, cost: Cost | None) -> None:
        super().__init__(context, weights, Policy(watchdog=None), torch.device(HOST))
        self.cost = cost
        self.visits: dict[str, _Visits] = {}

    def map(self, calls: Sequence[Call]) -> list[Update | None]:
        answers = super().map(calls)
        for call, update in zip(calls, answers, strict=True):
            if update is not None:
                self.visits.setdefault(call.client, _Visits()).add(call, update, self.cost)
        return answers


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """Clients that hold as much of the model as each other: the one that is tried, and all of them."""

    tried: str
    clients: list[str] = field(default_factory=list)


@settings_restored()
def work_of_rounds(setup: Setup) -> tuple[Work, Work]:
    """The expected work of the first round of a prepared run, and of each later one.

    Of clients that hold as much of the model the one with the fewest examples is tried; others do as many
    times as many batches as their numbers of examples say. Nothing is written.

    Not known are how often a client answers that is faster than others, injected faults, and messages that
    grow with the number of clients or change in the middle of a run, as those of SLoRA's second stage.

    Raises:
        RayFedError: A client failed.
    """
    experiment, context = setup.experiment, setup.context
    if not experiment.server.trains:
        return Work(), Work()
    kinds = _kinds(experiment)
    tried = [kind.tried for kind in kinds]
    lane = _Counting(context, context.weights(), experiment.cost)
    state = experiment.server.start(lane.worker.start_params())
    rounds = []
    for round in range(ROUNDS):
        lane.visits = {}
        state = replace(state, round=round)
        cohort = replace(
            cohort_of(replace(experiment, faults=None), lane, round, tuple(tried)),
            clients=ClientTable.of({cid: experiment.clients[cid] for cid in tried}),
            capacity=experiment.capacity or dict.fromkeys(tried, max((experiment.depth + 1) // 2, 1)),
        )
        state = experiment.server.round(state, cohort, experiment.local)
        own = {kind.tried: _expected(experiment, context.train, kind, lane, cohort.ledger) for kind in kinds}
        rounds.append({cid: work for cid, work in own.items() if work is not None})
    visits = experiment.server.answers(experiment.clients_per_round)
    before = sum(row["down"] + row["up"] for row in experiment.before)
    first, later = (_mean(kinds, each).times(visits) for each in (rounds[:1], rounds[1:]))
    return first + Work(bytes=before), later


def _mean(kinds: Sequence[_Kind], rounds: Sequence[Mapping[str, Work]]) -> Work:
    """The work of a visit, the mean over the clients of all kinds that answered in these rounds.

    A kind that answers more often than others counts no more: which answer first is drawn.
    """
    total, clients = Work(), 0
    for kind in kinds:
        if own := [works[kind.tried] for works in rounds if kind.tried in works]:
            total += sum(own, Work()).times(len(kind.clients) / len(own))
            clients += len(kind.clients)
    return total.times(1 / clients)


def _kinds(experiment: RoundPlan) -> list[_Kind]:
    """The clients that have examples, by what they hold of the model; of many kinds, neighbours are one."""
    found: dict[tuple[int, int], list[str]] = {}
    for cid, info in experiment.clients.items():
        if info.num_examples:
            held = experiment.capacity[cid] if experiment.capacity is not None else 0
            found.setdefault((held, experiment.ranks.get(cid, 0)), []).append(cid)
    ordered = [found[held] for held in sorted(found)]
    size = -(-len(ordered) // MOST_KINDS)
    merged = [[*chain(*ordered[i : i + size])] for i in range(0, len(ordered), size)]
    return [
        _Kind(tried=min(cids, key=lambda cid: experiment.clients[cid].num_examples), clients=cids)
        for cids in merged
    ]


def _expected(
    experiment: RoundPlan, train: TrainConfig, kind: _Kind, lane: _Counting, ledger: Ledger
) -> Work | None:
    """The work of a client of a kind, the mean over all, from that of the one that was tried in a round.

    None: it did not answer.
    """
    if (own := lane.visits.get(kind.tried)) is None:
        return None
    sizes = [experiment.clients[cid].num_examples for cid in kind.clients]
    n = experiment.clients[kind.tried].num_examples
    longer = fmean(map(train.steps, sizes)) / max(train.steps(n), 1)
    larger = fmean(map(train.examples, sizes)) / max(train.examples(n), 1)
    sent = sum(row["down"] + row["up"] for row in ledger.transfers if row["client"] == kind.tried)
    operations = longer * own.trained_steps * own.of_step + larger * own.trained_rows * own.of_row
    return Work(
        steps=longer * own.steps,
        examples=larger * own.rows,
        flops=None if experiment.cost is None else operations,
        bytes=sent,
    )
