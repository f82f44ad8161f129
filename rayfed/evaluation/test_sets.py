"""Test sets that are scored in a round: of clients, of domains, and of held-out domains.

Many small sets are scored in packs, whose examples share batches: the cost is by example then, not by set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from rayfed.client_facts import ClientInfo, Splits
from rayfed.data.partition.dealing import Indices
from rayfed.data.partition.partition import Partition, union
from rayfed.errors import ConfigError
from rayfed.seeds import generator

Validation: TypeAlias = bool | Literal["clients", "domains"]

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


DOMAIN_VALIDATION = "val_of_domain"
"""Name of the split with the validation examples of all clients of a domain, of clients and of domains."""


def validation_split(partition: Partition, wanted: Validation) -> str:
    """The split on which models are validated. Args: wanted: `evaluation.validation`."""
    return (
        DOMAIN_VALIDATION
        if wanted == "domains" and partition.drawn is None and not partition.pooled
        else "val"
    )


def validation_sets(
    partition: Partition,
    wanted: Validation,
    per_client: bool,
    clients: Literal["all"] | int,
    seed: int,
) -> tuple[EvaluationSet, ...]:
    """Sets on which a model is validated, each once; those without validation examples get no score.

    The clients of a virtual population draw from the validation split of their domain, which is scored.

    Args:
        partition: The examples of all clients and domains.
        wanted: `evaluation.validation`: each client's own examples, or those of all clients of its domain.
        per_client: Score every client separately, because its model has its own tensors.
        clients: Number of clients of a virtual population that are then scored.

    Raises:
        ConfigError: The clients of a virtual population have their own models, and no domain's examples.
    """
    if not wanted:
        return ()
    if partition.drawn is not None and not partition.pooled:
        if per_client and wanted == "domains":
            raise ConfigError(
                "evaluation.validation: domains cannot be used with data.population where clients have "
                "models of their own; set clients"
            )
        if per_client:
            return own_sets(partition.training, _choose_clients(partition, clients, seed))
        counts = partition.table.clients_by_domain()
        return tuple(
            EvaluationSet(id=PREFIX + domain, domain=domain, clients=(), others=count)
            for domain, count in counts.items()
        )
    if wanted == "domains" and not per_client and not partition.pooled:
        names: dict[str, list[str]] = {}
        for name, info in partition.training.items():
            names.setdefault(info.domain, []).append(name)
        return tuple(EvaluationSet(id=PREFIX + d, domain=d, clients=tuple(own)) for d, own in names.items())
    return own_sets(partition.training)


def own_sets(
    clients: Mapping[str, ClientInfo], wanted: Iterable[str] | None = None
) -> tuple[EvaluationSet, ...]:
    """A set for each client. Args: clients: their facts. wanted: which of them; None: all."""
    names = clients if wanted is None else wanted
    return tuple(EvaluationSet(id=name, domain=clients[name].domain, clients=(name,)) for name in names)


def personal_sets(partition: Partition, wanted: Literal["all"] | int, seed: int) -> tuple[EvaluationSet, ...]:
    """Sets of the clients whose personal models are scored: the same choice as for the global model.

    Args:
        partition: The examples of all clients.
        wanted: Number of clients.
    """
    if partition.pooled:
        return own_sets(partition.training)
    return own_sets(partition.training, _choose_clients(partition, wanted, seed))


def with_domain_validation(
    splits: Mapping[str, Splits], partition: Partition, per_client: bool
) -> Mapping[str, Splits]:
    """Row numbers with the split `DOMAIN_VALIDATION` of domains, and of clients that are scored alone."""
    found = dict(splits)
    rows: dict[str, list[Indices]] = {}
    for part in partition.trainers:
        rows.setdefault(part.domain, []).append(part.val)
    for domain, own in rows.items():
        found[PREFIX + domain] = {**found.get(PREFIX + domain, {}), DOMAIN_VALIDATION: union(own)}
    if per_client:
        for part in partition.trainers:
            whole = found[PREFIX + part.domain][DOMAIN_VALIDATION]
            found[part.id] = {**found[part.id], DOMAIN_VALIDATION: whole}
    return found


def all_splits(partition: Partition) -> dict[str, Splits]:
    """Row numbers of the splits of what can be called, by id: listed clients, and domains."""
    splits: dict[str, Splits] = {}
    for part in partition.listed:
        splits[part.id] = {"train": part.train, "val": part.val, "test": part.test}
    return splits | {PREFIX + domain: own for domain, own in partition.fixed_sets().items()}
