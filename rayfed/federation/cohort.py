"""The clients of one round, as the server sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rayfed.errors import NobodyAnsweredError
from rayfed.federation.executor import Call, Executor, Task
from rayfed.heterogeneity.faults import Faults
from rayfed.types import Broadcast, Update

TRAINING = "fit"
"""Tag of the training exchange of every method, so that all draw the same random numbers in it."""


@dataclass(frozen=True, kw_only=True)
class ClientInfo:
    """What a server may know about a client before it answers.

    Attributes:
        domain: Name of its domain; methods that must not know it use it for reports only.
        num_examples: Training examples.
    """

    domain: str
    num_examples: int


@dataclass(frozen=True)
class Answer:
    """Metrics of one client in one exchange."""

    exchange: str
    client: str
    metrics: Mapping[str, float]


@dataclass
class Ledger:
    """What happened in a round besides its result.

    Attributes:
        transfers: One row per client and exchange: exchange, client, bytes down and up.
        scores: What clients answered besides tensors, one entry per client and exchange that has metrics.
        tables: Rows of a method's own tables (allocations, clusters, weights), by table name.
        metrics: Scalars of the round, by name.
        missing: Clients that were called and did not answer, each once, in the order in which that happened;
            they are not called again in this round.
        seconds: How long the exchanges took on the virtual clock.
    """

    transfers: list[dict[str, Any]] = field(default_factory=list)
    scores: list[Answer] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def total(self, direction: str) -> int:
        return sum(row[direction] for row in self.transfers)


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """Clients taking part in a round. `run` is the only way a server reaches them.

    Attributes:
        round: Round index, from 0.
        ids: Clients of this round, in the order in which everything is summed.
        clients: All clients of the experiment, by id, in order.
        seed: Seed of the experiment, for `rayfed.seeds.derive`.
        rounds: Planned number of rounds.
        depth: Number of backbone blocks, 0 where the backbone has no uniform blocks.
        capacity: Blocks each client can hold in this round.
        block_bytes: Size of the frozen weights of each block, for methods that send them.
        executor: Where calls run.
        ledger: Collects traffic, tables and metrics of the round.
        faults: What goes wrong on purpose; None: nothing, and there is no virtual clock.
    """

    round: int
    ids: tuple[str, ...]
    clients: Mapping[str, ClientInfo]
    seed: int
    rounds: int
    depth: int
    capacity: Mapping[str, int]
    executor: Executor
    block_bytes: tuple[int, ...] = ()
    ledger: Ledger = field(default_factory=Ledger)
    faults: Faults | None = None

    @property
    def all_ids(self) -> tuple[str, ...]:
        return tuple(self.clients)

    @property
    def everyone(self) -> Cohort:
        """All clients that can be reached in this round, whether or not they take part in it."""
        faults = self.faults
        reached = (cid for cid in self.all_ids if faults is None or faults.is_available(self.round, cid))
        return replace(self, ids=tuple(reached))

    def looking(self, ids: tuple[str, ...] | None = None) -> Cohort:
        """The same round seen from outside (by other ids): what we look at is not counted and never lost."""
        return replace(self, ids=self.ids if ids is None else ids, ledger=Ledger(), faults=None)

    def prefix(self, client: str) -> tuple[int, ...] | None:
        """The first blocks, as many as the client can hold; None where it holds all of them."""
        held = self.capacity[client]
        return None if held == self.depth else tuple(range(held))

    def run(
        self, task: Task, sent: Broadcast | Mapping[str, Broadcast], tag: str | None = None
    ) -> Sequence[Update]:
        """One exchange: the same message for all, or one message per client (clients without one stay idle).

        Two calls with the same tag in the same round see the same random numbers; give a tag to tell them
        apart.

        Clients may be missing: one that was called in this round and did not answer is noted in the ledger
        and not called again.

        Returns:
            One answer per client that answered, in the order of `ids`: pair by `Update.client`.

        Raises:
            KeyError: A message is addressed to somebody outside the cohort.
            NobodyAnsweredError: There are messages but no answers.
            ClientError: A client failed.
        """
        tag = tag or task_name(task)
        each = sent if isinstance(sent, Mapping) else dict.fromkeys(self.ids, sent)
        strangers = sorted(each.keys() - set(self.ids))
        if strangers:
            raise KeyError(f"not in the cohort of round {self.round}: {strangers}")
        gone = set(self.ledger.missing)
        calls = [self._call(cid, task, tag, each[cid]) for cid in self.ids if cid in each and cid not in gone]
        found = self._answers(calls)
        for call in calls:
            row = {"exchange": tag, "client": call.client, "down": call.sent.num_bytes(), "up": 0}
            if update := found.get(call.client):
                row["up"] = update.num_bytes()
                if update.metrics:
                    self.ledger.scores.append(Answer(tag, call.client, update.metrics))
            self.ledger.transfers.append(row)
        if each and not found:
            raise NobodyAnsweredError(f"round {self.round + 1}: nobody answered in exchange {tag!r}")
        return list(found.values())

    def _call(self, cid: str, task: Task, tag: str, sent: Broadcast) -> Call:
        info, share = self.clients.get(cid), 1.0
        if sent.blocks and self.depth:
            share = len(sent.blocks) / self.depth
        cost = (float(info.num_examples) if info else 1.0) * share
        seconds = self.faults.seconds(cid, sent, share, tag == TRAINING) if self.faults else 0.0
        return Call(cid, task, tag, sent, cost, seconds)

    def _answers(self, calls: Sequence[Call]) -> dict[str, Update]:
        """Run the calls that no injected fault loses; answers by client. Notes who is missing and why."""
        faults = self.faults
        causes = {c.client: faults.cause(self.round, c.client, c.seconds) if faults else "" for c in calls}
        # A client that drops out is not run, so its private state stays as it was.
        running = [call for call in calls if not causes[call.client]]
        answers = zip(running, self.executor.map(running), strict=True)
        found = {call.client: update for call, update in answers if update is not None}
        for call in calls:
            if call.client not in found:
                self.ledger.missing.append(call.client)
                cause = causes[call.client] or "error"
                self.record("missing", client=call.client, exchange=call.tag, cause=cause)
        if faults is not None:
            self.ledger.seconds += faults.duration({c.client: c.seconds for c in calls}, found)
        return found

    def record(self, table: str, **row: Any) -> None:
        """Add a row to one of the method's own tables; the round is added when it is written."""
        self.ledger.tables.setdefault(table, []).append(row)

    def measure(self, **metrics: float) -> None:
        """Add scalars to the row of this round."""
        self.ledger.metrics.update(metrics)


def task_name(task: Task) -> str:
    """Name of a task function, also through `functools.partial`."""
    inner = getattr(task, "func", task)
    return str(getattr(inner, "__name__", type(inner).__name__))
