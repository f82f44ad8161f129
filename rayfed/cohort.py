"""The clients of one round, as the server sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from rayfed.client import Client
from rayfed.failures import Event
from rayfed.types import Broadcast, Update

Task: TypeAlias = Callable[[Client, Broadcast], Update]


@dataclass(frozen=True)
class Call:
    """One task for one client.

    Attributes:
        client: Who is called.
        task: What it does; importable by name, or a `functools.partial` of such a function.
        tag: Names the random stream of the call, together with round and client.
        sent: What the server sends.
        cost: Relative work, to place the longest calls first; never changes a result.
    """

    client: str
    task: Task
    tag: str
    sent: Broadcast
    cost: float = 1.0


@dataclass(frozen=True)
class Kept:
    """A client's private store between two calls.

    Attributes:
        serial: Another number for every store that was ever kept.
        value: The store, or where it is.
    """

    serial: int
    value: Any


class Executor(Protocol):
    """Runs calls anywhere, in any order, and keeps what clients keep.

    Attributes:
        on_event: Told about every failure.
    """

    on_event: Callable[[Event], None]

    def map(self, calls: Sequence[Call]) -> Sequence[Update | None]:
        """Answer in the order given, None for a client that was dropped.

        Tensors of an answer may be read-only views.
        """

    def stores(self) -> dict[str, Kept]:
        """What every client keeps now, by client."""

    def fetch(self, kept: Kept) -> dict[str, Any]:
        """The content of one store."""

    def restore(self, client: str, store: Mapping[str, Any]) -> None:
        """Give a client its store back."""

    def forget(self) -> None:
        """Drop all stores."""

    def stop(self) -> None:
        """Raise Stopped in the exchange under way, and in every later one."""

    def close(self) -> None:
        """End what this executor started."""


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
    """

    transfers: list[dict[str, Any]] = field(default_factory=list)
    scores: list[Answer] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

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

    @property
    def all_ids(self) -> tuple[str, ...]:
        return tuple(self.clients)

    @property
    def everyone(self) -> Cohort:
        """All clients of the experiment, whether or not they take part in this round."""
        return replace(self, ids=self.all_ids)

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

        Returns:
            One answer per called client, in the order of `ids`.

        Raises:
            KeyError: A message is addressed to somebody outside the cohort.
            ClientError: A client failed.
        """
        tag = tag or task_name(task)
        each = sent if isinstance(sent, Mapping) else dict.fromkeys(self.ids, sent)
        strangers = sorted(each.keys() - set(self.ids))
        if strangers:
            raise KeyError(f"not in the cohort of round {self.round}: {strangers}")
        called = [cid for cid in self.ids if cid in each]
        calls = [Call(cid, task, tag, each[cid], self._cost(cid, each[cid])) for cid in called]
        updates = [update for update in self.executor.map(calls) if update is not None]
        for cid, update in zip(called, updates, strict=True):
            self.ledger.transfers.append(
                {"exchange": tag, "client": cid, "down": each[cid].num_bytes(), "up": update.num_bytes()}
            )
            if update.metrics:
                self.ledger.scores.append(Answer(tag, cid, update.metrics))
        return updates

    def record(self, table: str, **row: Any) -> None:
        """Add a row to one of the method's own tables; the round is added when it is written."""
        self.ledger.tables.setdefault(table, []).append(row)

    def measure(self, **metrics: float) -> None:
        """Add scalars to the row of this round."""
        self.ledger.metrics.update(metrics)

    def _cost(self, cid: str, sent: Broadcast) -> float:
        info = self.clients.get(cid)
        share = len(sent.blocks) / self.depth if sent.blocks and self.depth else 1.0
        return (float(info.num_examples) if info else 1.0) * share


def task_name(task: Task) -> str:
    """Name of a task function, also through `functools.partial`."""
    inner = getattr(task, "func", task)
    return str(getattr(inner, "__name__", type(inner).__name__))
