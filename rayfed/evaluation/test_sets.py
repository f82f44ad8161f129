"""Test sets that are scored in a round: of clients, of domains, and of held-out domains.

Many small sets are scored in packs, whose examples share batches: the cost is by example then, not by set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rayfed.data.examples import Splits
from rayfed.data.partition.make import Partition
from rayfed.seeds import generator

PREFIX = "domain:"
PACK = "pack:"

SMALL = 32
"""Sets with fewer examples are packed."""

MANY = 64
"""Sets are packed only where more of them than this are small."""


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


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Small sets whose examples share batches.

    Attributes:
        id: What is called for all of them, `pack:<split>:<number>`.
        split: The split that is scored.
        sizes: Number of examples of each set, by id of the set, in the order of the examples.
    """

    id: str
    split: str
    sizes: Mapping[str, int]


def packs(ids: Iterable[str], splits: Mapping[str, Splits], split: str, rows: int) -> tuple[Pack, ...]:
    """Packs of the small sets among these, in their order, so that the batches follow from names.

    Args:
        ids: Ids of sets.
        splits: Row numbers by set and split.
        split: The split that is scored.
        rows: Largest number of examples of a pack, which is one batch.

    Returns:
        The packs; none where few sets are small.
    """
    sizes = {i: len(splits[i].get(split, ())) for i in ids}
    small = {i: n for i, n in sizes.items() if 0 < n < min(SMALL, rows)}
    if len(small) <= MANY:
        return ()
    filled: list[dict[str, int]] = [{}]
    for i, n in small.items():
        if sum(filled[-1].values()) + n > rows:
            filled.append({})
        filled[-1][i] = n
    return tuple(
        Pack(id=f"{PACK}{split}:{number}", split=split, sizes=own) for number, own in enumerate(filled)
    )


def pack_splits(packed: Iterable[Pack], splits: Mapping[str, Splits]) -> dict[str, Splits]:
    """Row numbers of packs by id and split: those of their sets, one after the other."""
    return {
        pack.id: {pack.split: np.concatenate([splits[i][pack.split] for i in pack.sizes])} for pack in packed
    }


def drawn_sets(
    sets: Sequence[EvaluationSet], wanted: Literal["all"] | int, seed: int
) -> tuple[EvaluationSet, ...]:
    """The sets that are scored: those of `wanted` clients, the same in all rounds and for all methods.

    Test sets of domains are always scored.

    Args:
        sets: All test sets.
        wanted: Number of clients to draw, where clients have sets of their own.
        seed: Seed of the experiment.
    """
    own = [i for i, one in enumerate(sets) if one.clients == (one.id,)]
    if wanted == "all" or wanted >= len(own):
        return tuple(sets)
    drawn = generator(seed, "evaluation").choice(len(own), size=wanted, replace=False)
    left_out = set(own).difference(own[i] for i in drawn)
    return tuple(one for i, one in enumerate(sets) if i not in left_out)


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
