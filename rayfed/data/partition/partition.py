"""A partition: the samples of every client, and the samples of held-out domains."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rayfed.client_facts import ClientInfo, ClientTable, Drawn, Splits
from rayfed.data.partition.dealing import Indices

SPLITS = ("train", "val", "test")


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientSplit:
    """The samples of one client: ascending indices into the data set, int64.

    Attributes:
        id: Id such as `c07-sketch`; clients are in alphabetical order of their ids.
        domain: Domain of its samples.
        train: Samples to train on, at least one.
        val: Samples for validation, possibly none.
        test: Samples for testing; with an official test split all those of the domain, shared by its clients.
    """

    id: str
    domain: str
    train: Indices
    val: Indices
    test: Indices


@dataclass(frozen=True, kw_only=True, eq=False)
class Partition:
    """The samples of all clients, and of held-out domains.

    Attributes:
        clients: The clients in the order of their ids; clients of one domain are consecutive, and domains are
            in the order of the config.
        held_out: Indices of all samples of each held-out domain.
        official_test: Whether the clients of a domain share its official test split.
        pooled: Whether one client trains on the samples of all clients (the centralised reference).
        unseen: Ids of the clients that never train.
    """

    clients: Sequence[ClientSplit]
    held_out: dict[str, Indices]
    official_test: bool
    pooled: bool
    unseen: frozenset[str] = frozenset()

    @property
    def drawn(self) -> Drawn | None:
        """The clients whose samples are drawn when they are asked for; None: all samples are listed."""
        return None

    @cached_property
    def listed(self) -> Sequence[ClientSplit]:
        """The clients whose samples are listed, in order; those that only train come last."""
        return (*self.clients, *(self.trainers if self.pooled else ()))

    @cached_property
    def trainers(self) -> Sequence[ClientSplit]:
        """The clients that train, or with `pooled` a single one that has the samples of all of them."""
        training = tuple(c for c in self.clients if c.id not in self.unseen) if self.unseen else self.clients
        if not self.pooled:
            return training
        train, val, test = (union([getattr(c, s) for c in training]) for s in SPLITS)
        return (ClientSplit(id="pooled", domain="pooled", train=train, val=val, test=test),)

    @cached_property
    def table(self) -> ClientTable:
        """Facts about all clients."""
        return table_of(self.clients)

    @cached_property
    def training(self) -> ClientTable:
        """Facts about the clients that train."""
        return table_of(self.trainers) if self.pooled or self.unseen else self.table

    @property
    def longest(self) -> int:
        """Number of samples of the largest split of a client."""
        return max(len(rows) for c in self.clients for rows in (c.train, c.val, c.test))

    def count(self, split: str) -> int:
        """Number of training or validation samples of all clients together."""
        return sum(len(getattr(client, split)) for client in self.clients)

    def domain_tests(self) -> dict[str, Indices]:
        """Test samples of each domain that has clients."""
        return {name: union(own) for name, own in self._by_domain("test").items()}

    def domain_training(self) -> dict[str, Indices]:
        """Training samples of each domain that has clients; those of several clients are repeated."""
        return {name: np.concatenate(own) for name, own in self._by_domain("train").items()}

    def fixed_sets(self) -> dict[str, Splits]:
        """Row numbers by split of what is evaluated for all clients of a domain, by domain."""
        return {name: {"test": rows} for name, rows in {**self.domain_tests(), **self.held_out}.items()}

    def pieces(self) -> Iterator[tuple[str, str, Indices]]:
        """Client, split and samples of the rows of the manifest; no client: the samples belong to none."""
        for client in self.clients:
            yield client.id, "train", client.train
            yield client.id, "val", client.val
            if not self.official_test:
                yield client.id, "test", client.test
        if self.official_test:
            for own in self.domain_tests().values():
                yield "", "test", own
        for own in self.held_out.values():
            yield "", "held_out", own

    @cached_property
    def digest(self) -> str:
        """sha256 of ids, domains and index arrays."""
        out = hashlib.sha256()
        for name, arrays in (*self._facts(), *((f"held_out|{n}", [own]) for n, own in self.held_out.items())):
            out.update(f"{name}|{'|'.join(str(len(array)) for array in arrays)}\n".encode())
            for array in arrays:
                out.update(array.astype("<i8").tobytes())
        return out.hexdigest()

    def _facts(self) -> Iterator[tuple[str, list[Indices]]]:
        """Facts on which the digest depends besides held-out domains, by name."""
        yield from ((f"{c.id}|{c.domain}", [c.train, c.val, c.test]) for c in self.clients)
        yield from ((f"unseen|{name}", []) for name in sorted(self.unseen))

    def _by_domain(self, split: str) -> dict[str, list[Indices]]:
        parts: dict[str, list[Indices]] = {}
        for client in self.clients:
            parts.setdefault(client.domain, []).append(getattr(client, split))
        return parts


def table_of(clients: Sequence[ClientSplit]) -> ClientTable:
    """The table of these clients."""
    infos = {c.id: ClientInfo(domain=c.domain, num_examples=len(c.train)) for c in clients}
    return ClientTable.of(infos)


def union(arrays: Sequence[Indices]) -> Indices:
    """All indices of the arrays, each once, ascending."""
    return np.unique(np.concatenate(arrays)) if arrays else np.empty(0, dtype=np.int64)
