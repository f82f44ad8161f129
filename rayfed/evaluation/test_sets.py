"""Test sets that are scored in a round: of clients, of domains, and of held-out domains."""

from __future__ import annotations

from dataclasses import dataclass

from rayfed.data.examples import Splits
from rayfed.data.partition.make import Partition

PREFIX = "domain:"


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """One test set.

    Attributes:
        id: Id of a client, which is scored on its test split, or `domain:<name>`.
        domain: Domain of the examples.
        clients: Clients that get this score; empty for a held-out domain.
    """

    id: str
    domain: str
    clients: tuple[str, ...]


def evaluation_sets(partition: Partition, per_client: bool) -> tuple[EvaluationSet, ...]:
    """Test sets of a partition, each scored once.

    Args:
        partition: The examples of all clients and domains.
        per_client: Score every client separately, even where the clients of a domain have a common test set.
            This is needed where clients keep BatchNorm statistics of their own, which the global model uses.
    """
    shared = partition.official_test and not per_client
    sets: list[EvaluationSet] = []
    if shared:
        owners: dict[str, list[str]] = {}
        for client in partition.clients:
            owners.setdefault(client.domain, []).append(client.id)
        sets += [EvaluationSet(id=PREFIX + d, domain=d, clients=tuple(ids)) for d, ids in owners.items()]
    else:
        sets += [EvaluationSet(id=c.id, domain=c.domain, clients=(c.id,)) for c in partition.clients]
    return (*sets, *(EvaluationSet(id=PREFIX + d, domain=d, clients=()) for d in partition.held_out))


def all_splits(partition: Partition) -> dict[str, Splits]:
    """Row numbers of the splits of everything that can be called, by id: clients, trainers and domains."""
    splits: dict[str, Splits] = {}
    for part in (*partition.clients, *partition.trainers):
        splits[part.id] = {"train": part.train, "val": part.val, "test": part.test}
    for domain, rows in {**partition.domain_tests(), **partition.held_out}.items():
        splits[PREFIX + domain] = {"test": rows}
    return splits
