"""The clients of one round, how a server calls them, and what their training costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from torch import Tensor

from rayfed.client_facts import ClientInfo, ClientTable
from rayfed.devices import with_fields_made_here
from rayfed.errors import NobodyAnsweredError
from rayfed.federation.attacks import with_attack
from rayfed.federation.executor import Call, ClientTask, Executor, Leave
from rayfed.federation.noise_and_compression import OPEN, Channel
from rayfed.heterogeneity.faults import HONEST, Faults
from rayfed.types import Broadcast, Update, at_rank


@dataclass(frozen=True)
class Load:
    """Cost of a model with some number of blocks.

    Attributes:
        step: Operations of one step, whatever the number of rows in its batch.
        row: Operations of each row of a batch, forward and backward.
        trained: Numbers that are trained.
    """

    step: int
    row: int
    trained: int


@dataclass(frozen=True)
class Cost:
    """Cost of a visit in which a client trains.

    Attributes:
        loads: Cost of the model by its number of blocks; others are interpolated, which is exact where all
            blocks are alike.
        depth: Number of blocks of the whole model.
    """

    loads: Mapping[int, Load]
    depth: int

    def of_visit(self, sent: Broadcast, steps: int, rows: int) -> tuple[int, int]:
        """Operations of the batches that a client drew in a visit, and the numbers that it trains.

        Args:
            sent: The message, which says what blocks the client holds.
            steps: Training batches of the visit; a method that trains two models draws two for a step.
            rows: Examples in these batches.
        """
        load = self.load(sent.blocks)
        return steps * load.step + rows * load.row, load.trained

    def load(self, blocks: Collection[int] | None) -> Load:
        """Cost of the model with these blocks; None: all of them."""
        number = self.depth if blocks is None else len(blocks)
        if number in self.loads:
            return self.loads[number]
        known = sorted(self.loads)
        parts = ([getattr(self.loads[n], part) for n in known] for part in ("step", "row", "trained"))
        step, row, trained = (round(float(np.interp(number, known, values))) for values in parts)
        return Load(step=step, row=row, trained=trained)


__all__ = ["TRAINING", "Answer", "ClientInfo", "Cohort", "Federation", "Ledger", "task_name"]

TRAINING = "fit"
"""Tag of the training exchange. All methods share it, so clients draw the same random numbers in each."""


@dataclass(frozen=True)
class Answer:
    """Metrics that one client returned in one exchange, and what was kept for scores of several clients."""

    exchange: str
    client: str
    metrics: Mapping[str, float]
    scored: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass
class Ledger:
    """Traffic, client metrics and method tables of one round.

    Attributes:
        transfers: One row per client and exchange, with the keys exchange, client, down and up (bytes).
        scores: Metrics that clients returned, one entry per client and exchange that has any.
        tables: Rows of the method's tables (allocations, clusters, weights), by table name.
        metrics: Scalars of the round, by name.
        missing: Ids of the clients that were called and did not answer, each once, in the order of the
            failures. They are not called again in this round.
        seconds: Duration of all exchanges on the virtual clock, in seconds.
        flops: Floating-point operations of the training steps of all answers (`rayfed.federation.cohort`).
        trained: Numbers that a client trains; the largest of the round.
        steps: Training batches of all answers.
        rows: Examples in these batches.
        tokens: Tokens of texts in these batches, without pads.
        learned: Of these, those that a language model learned.
    """

    transfers: list[dict[str, Any]] = field(default_factory=list)
    scores: list[Answer] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    seconds: float = 0.0
    flops: int = 0
    trained: int = 0
    steps: int = 0
    rows: int = 0
    tokens: int = 0
    learned: int = 0

    def total(self, direction: str) -> int:
        """Bytes of all transfers in one direction, `down` or `up`."""
        return sum(row[direction] for row in self.transfers)


@dataclass(frozen=True, kw_only=True)
class Federation:
    """Facts that the rounds of an experiment share: clients, what they can hold, and what happens to them.

    Attributes:
        clients: All clients of the experiment, by id, in the order in which updates are summed.
        seed: Seed of the experiment, for `rayfed.seeds.derive`.
        rounds: Planned number of rounds.
        depth: Number of backbone blocks; 0: the backbone has no uniform blocks.
        ranks: Rank of the LoRA adapters of each client, by id; empty: that of the tuning for all.
        block_bytes: Size of the frozen weights of each block in bytes, for methods that send them.
        faults: Injected faults (`rayfed.heterogeneity.faults`); None: no faults and no virtual clock.
        group: Number of clients that share their passes in the training exchange.
        channel: What happens to the answers of the training exchange on their way to the server.
        cost: What the visits of the training exchange cost; None: it is not counted.
    """

    clients: ClientTable
    seed: int
    rounds: int
    depth: int = 0
    ranks: Mapping[str, int] = field(default_factory=dict)
    block_bytes: tuple[int, ...] = ()
    faults: Faults | None = None
    group: int = 1
    channel: Channel = OPEN
    cost: Cost | None = None


@dataclass(frozen=True, kw_only=True)
class Cohort(Federation):
    """Clients taking part in a round. `run` is the only way a server reaches them.

    Attributes:
        round: Round index, from 0.
        ids: Ids of the clients of this round, in the order in which updates are summed.
        capacity: Number of blocks each client can hold in this round, by id.
        executor: Runs the calls.
        ledger: Collects traffic, tables and metrics of the round.
    """

    round: int
    ids: tuple[str, ...]
    capacity: Mapping[str, int]
    executor: Executor
    ledger: Ledger = field(default_factory=Ledger)

    @classmethod
    def of_round(cls, whole: Federation, **of_round: Any) -> Cohort:
        """The clients of a round of an experiment.

        Args:
            of_round: The fields of this class, and those of the experiment that differ in this round.
        """
        shared = {one.name: getattr(whole, one.name) for one in fields(Federation)}
        return cls(**{**shared, **of_round})

    @property
    def all_ids(self) -> tuple[str, ...]:
        """Ids of all clients of the experiment, in order, which may be very many."""
        return tuple(self.clients)

    @property
    def everyone(self) -> Cohort:
        """A cohort of all clients that are available in this round, whether or not they were sampled."""
        faults = self.faults
        available = (cid for cid in self.all_ids if faults is None or faults.is_available(self.round, cid))
        return replace(self, ids=tuple(available))

    def of(self, ids: Collection[str]) -> Cohort:
        """A cohort of these clients, in client order, in the same round and with the same ledger.

        Args:
            ids: Any clients of the experiment, such as some whose answers to an earlier message arrive now.
        """
        return replace(self, ids=tuple(self.clients.in_order(ids)))

    def for_reporting(self, ids: tuple[str, ...] | None = None) -> Cohort:
        """This cohort for exchanges that only measure: traffic is not counted, faults and ranks are off.

        Args:
            ids: Clients or evaluation sets to call; None: the clients of this cohort.
        """
        return replace(self, ids=self.ids if ids is None else ids, ledger=Ledger(), faults=None, ranks={})

    def prefix(self, client: str) -> tuple[int, ...] | None:
        """Indices of the first blocks, as many as the client can hold; None: it holds all blocks."""
        held = self.capacity[client]
        return None if held == self.depth else tuple(range(held))

    def seconds(self, client: str, sent: Broadcast) -> float:
        """Virtual seconds from sending a training message to the answer, or until the deadline if it is lost.

        They are known before the client trains, for servers that do not wait for all clients; 0 without the
        virtual clock.
        """
        if self.faults is None:
            return 0.0
        seconds = self._seconds(client, sent, TRAINING)
        return seconds if self.faults.deadline is None else min(seconds, self.faults.deadline)

    def run(
        self,
        task: ClientTask,
        sent: Broadcast | Mapping[str, Broadcast],
        tag: str | None = None,
        lasts: float | None = None,
    ) -> Sequence[Update]:
        """One exchange: send a message to each client, run the task there, and return the answers.

        A client that was called in this round and did not answer is recorded in `ledger.missing` and not
        called again.

        Args:
            task: Function that runs at the client.
            sent: One message for all clients, or one per client id; clients without a message are not called.
            tag: Name of the exchange and of its random streams; None: the name of the task. Two exchanges of
                a round with the same tag draw the same random numbers.
            lasts: Virtual seconds that the exchange takes; None: until the last answer.

        Returns:
            One answer per client that answered, in the order of `ids`. Some may be missing, so match answers
            to clients by `Update.client`.

        Raises:
            KeyError: A message is addressed to a client outside the cohort.
            NobodyAnsweredError: Messages were sent and no client answered.
            ClientError: Code at a client failed, and the failure policy is to stop.
        """
        tag = tag or task_name(task)
        each = sent if isinstance(sent, Mapping) else dict.fromkeys(self.ids, sent)
        outside = sorted(each.keys() - set(self.ids))
        if outside:
            raise KeyError(f"messages for clients outside the cohort of round {self.round + 1}: {outside}")
        gone = set(self.ledger.missing)
        called = [cid for cid in self.ids if cid in each and cid not in gone]
        calls = [self._call(cid, task, tag, each[cid]) for cid in called]
        answers = self._answers(calls, lasts)
        for call in calls:
            row = {"exchange": tag, "client": call.client, "down": call.sent.num_bytes(), "up": 0}
            if update := answers.get(call.client):
                row["up"] = update.num_bytes()
                self._count_cost(call, update)
                self.ledger.steps += update.steps
                self.ledger.rows += update.rows
                self.ledger.tokens += update.tokens
                self.ledger.learned += update.learned
                if update.metrics:
                    self.ledger.scores.append(Answer(tag, call.client, update.metrics, update.scored))
            self.ledger.transfers.append(row)
        if each and not answers:
            raise NobodyAnsweredError(f"round {self.round + 1}: no client answered in exchange {tag!r}")
        if tag == TRAINING and self.faults is not None and self.faults.has_attackers:
            attackers = sum(self.faults.profiles[cid].attack != HONEST for cid in answers)
            self.measure(attackers=self.ledger.metrics.get("attackers", 0.0) + attackers)
        if tag == TRAINING and self.channel.changes and answers:
            held = {call.client: at_rank(call.sent) for call in calls}
            answers = {cid: self.channel.receive(held[cid], update) for cid, update in answers.items()}
            answers = self.channel.with_noise(held, answers)
        return list(answers.values())

    def _call(self, cid: str, task: ClientTask, tag: str, sent: Broadcast) -> Call:
        """The call of a client; in training its answer passes its attack, then the channel."""
        leaves: tuple[Leave, ...] = ()
        if tag == TRAINING and self.faults is not None:
            profile = self.faults.profiles[cid]
            task, leaves = with_attack(task, profile.attack, profile.attack_scale)
        if tag == TRAINING:
            leaves += self.channel.leaves
        info = self.clients.get(cid)
        sent = replace(sent, rank=self.ranks[cid]) if cid in self.ranks else sent
        examples = float(info.num_examples) if info else 1.0
        group = self.group if tag == TRAINING else 1
        seconds = self._seconds(cid, sent, tag)
        return Call(cid, task, tag, sent, examples, self._share(sent), seconds, group, leaves)

    def _count_cost(self, call: Call, update: Update) -> None:
        if self.cost is not None and call.tag == TRAINING:
            flops, trained = self.cost.of_visit(call.sent, update.steps, update.rows)
            self.ledger.flops += flops
            self.ledger.trained = max(self.ledger.trained, trained)

    def _share(self, sent: Broadcast) -> float:
        """Share of the backbone's blocks that the receiver of a message holds."""
        return len(sent.blocks) / self.depth if sent.blocks and self.depth else 1.0

    def _seconds(self, cid: str, sent: Broadcast, tag: str) -> float:
        """Virtual seconds of a visit; 0 without the virtual clock."""
        if self.faults is None:
            return 0.0
        sent = replace(sent, rank=self.ranks[cid]) if cid in self.ranks else sent
        return self.faults.seconds(cid, sent, self._share(sent), tag == TRAINING)

    def _answers(self, calls: Sequence[Call], lasts: float | None) -> dict[str, Update]:
        """Run the calls that no injected fault cancels, and record which clients are missing and why.

        Args:
            lasts: Virtual seconds that they take; None: until the last answer.

        Returns:
            Answers by client, in the order of the calls.
        """
        faults = self.faults
        causes = {c.client: faults.cause(self.round, c.client, c.seconds) if faults else "" for c in calls}
        # A client that drops out is not run, so its store stays as it was.
        running = [call for call in calls if not causes[call.client]]
        pairs = zip(running, self.executor.map(running), strict=True)
        answers = {
            call.client: with_fields_made_here(update, "params", "extra", "scored")
            for call, update in pairs
            if update is not None
        }
        for call in calls:
            if call.client not in answers:
                self.ledger.missing.append(call.client)
                cause = causes[call.client] or "error"
                self.record("missing", client=call.client, exchange=call.tag, cause=cause)
        if faults is not None:
            each = {c.client: c.seconds for c in calls}
            self.ledger.seconds += faults.duration(each, answers) if lasts is None else lasts
        return answers

    def record(self, table: str, **row: Any) -> None:
        """Add a row to one of the method's tables; the column `round` is added when the table is written."""
        self.ledger.tables.setdefault(table, []).append(row)

    def measure(self, **metrics: float) -> None:
        """Add scalars to this round's row of the results."""
        self.ledger.metrics.update(metrics)


def task_name(task: ClientTask) -> str:
    """Name of a task function, or of the function inside a `functools.partial`."""
    inner = getattr(task, "func", task)
    return str(getattr(inner, "__name__", type(inner).__name__))
