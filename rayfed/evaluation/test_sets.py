"""Test sets that are scored in a round: of clients, of domains, and of held-out domains.

Many small sets are scored in packs, whose examples share batches: the cost is by example then, not by set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rayfed.client_facts import Splits
from rayfed.data.partition.partition import Partition
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
        clients: Clients that get this score.
        others: Number of further clients that get this score and are not listed, because they are drawn from
            a virtual population.
        unseen: Clients that get this score and never train.
    """

    id: str
    domain: str
    clients: tuple[str, ...]
    others: int = 0
    unseen: tuple[str, ...] = ()

    @property
    def is_held_out(self) -> bool:
        """Whether no client has examples of this domain."""
        return not self.clients and not self.others and not self.unseen


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


def evaluation_sets(
    partition: Partition, per_client: bool, wanted: Literal["all"] | int, seed: int
) -> tuple[EvaluationSet, ...]:
    """Test sets of a partition, each scored once.

    Test sets of domains are always scored. Where clients have their own sets, `wanted` of the clients that
    train and as many of the others are drawn, the same in all rounds and for all methods.

    Args:
        partition: The examples of all clients and domains.
        per_client: Score every client separately, even where the clients of a domain have a common test set.
            This is needed where clients keep their own BatchNorm statistics, which the global model uses.
        wanted: Number of clients whose sets are scored.
        seed: Seed of the experiment.
    """
    table = partition.table
    sets: list[EvaluationSet] = []
    if partition.official_test and not per_client:
        for domain, places in zip(table.domains, table.places_by_domain(), strict=True):
            listed = () if partition.drawn is not None else tuple(table.names[place] for place in places)
            own = {
                "clients": tuple(name for name in listed if name not in partition.unseen),
                "unseen": tuple(name for name in listed if name in partition.unseen),
            }
            others = 0 if listed else len(places)
            sets.append(EvaluationSet(id=PREFIX + domain, domain=domain, others=others, **own))
    else:
        names = _choose_clients(partition, wanted, seed)
        sets += [EvaluationSet(id=name, domain=table[name].domain, clients=(name,)) for name in names]
        sets += unseen_sets(partition, wanted, seed)
    return (*sets, *(EvaluationSet(id=PREFIX + d, domain=d, clients=()) for d in partition.held_out))


def unseen_sets(partition: Partition, wanted: Literal["all"] | int, seed: int) -> tuple[EvaluationSet, ...]:
    """Test sets of the clients that never train, one for each of them, also where those of a domain share it.

    Args:
        partition: The examples of all clients.
        wanted: Number of clients whose sets are scored.
        seed: Seed of the experiment.
    """
    table = partition.table
    return tuple(
        EvaluationSet(id=name, domain=table[name].domain, clients=(), unseen=(name,))
        for name in _choose_clients(partition, wanted, seed, unseen=True)
    )


def _choose_clients(
    partition: Partition, wanted: Literal["all"] | int, seed: int, unseen: bool = False
) -> list[str]:
    """The clients that train, or those that never do, whose test sets are scored, in their order."""
    names = partition.table.names
    places: Sequence[int] = range(0 if unseen else len(names))
    if partition.unseen:
        places = [place for place, name in enumerate(names) if (name in partition.unseen) == unseen]
    if wanted != "all" and wanted < len(places):
        rng = generator(seed, "evaluation", *(["unseen"] if unseen else []))
        drawn = rng.choice(len(places), size=wanted, replace=False)
        places = [places[place] for place in sorted(drawn.tolist())]
    return [names[place] for place in places]


def validation_sets(partition: Partition) -> dict[str, int]:
    """Clients or sets with validation splits, and the number of clients that the score of each counts for.

    The clients of a virtual population draw from the validation split of their domain, which is scored.
    """
    if partition.drawn is None or partition.pooled:
        return dict.fromkeys(partition.training, 1)
    return {PREFIX + domain: count for domain, count in partition.table.clients_by_domain().items()}


def all_splits(partition: Partition) -> dict[str, Splits]:
    """Row numbers of the splits of what can be called, by id: listed clients, and domains."""
    splits: dict[str, Splits] = {}
    for part in partition.listed:
        splits[part.id] = {"train": part.train, "val": part.val, "test": part.test}
    return splits | {PREFIX + domain: own for domain, own in partition.fixed_sets().items()}
