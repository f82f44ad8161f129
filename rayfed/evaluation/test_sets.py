"""What is scored in a round: test sets of clients, of domains and of domains nobody trained on."""

from __future__ import annotations

from dataclasses import dataclass

from rayfed.data.client_data import Splits
from rayfed.data.partition.make import Partition

PREFIX = "domain:"


@dataclass(frozen=True, kw_only=True)
class EvaluationSet:
    """One test set.

    Attributes:
        id: A client, which is scored on its own test split, or `domain:<name>`.
        domain: Where its images come from.
        clients: Whose accuracy this is; empty for a held-out domain.
    """

    id: str
    domain: str
    clients: tuple[str, ...]


def evaluation_sets(partition: Partition, per_client: bool) -> tuple[EvaluationSet, ...]:
    """Test sets of a partition, each scored once.

    Args:
        partition: Who has what.
        per_client: Score every client by itself even where clients of a domain share its test set: needed
            when clients keep state of their own (BatchNorm statistics) that the global model runs with.
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
    """Row numbers of everything that can be called: trainers, clients with their test sets, and domains."""
    splits: dict[str, Splits] = {}
    for part in (*partition.clients, *partition.trainers):
        splits[part.id] = {"train": part.train, "val": part.val, "test": part.test}
    for domain, rows in {**partition.domain_tests(), **partition.held_out}.items():
        splits[PREFIX + domain] = {"test": rows}
    return splits
