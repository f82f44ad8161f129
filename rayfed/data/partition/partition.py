"""A partition: the samples of every client, and the samples of held-out domains."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rayfed.data.partition.dealing import Indices


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
    """

    clients: tuple[ClientSplit, ...]
    held_out: dict[str, Indices]
    official_test: bool
    pooled: bool

    @cached_property
    def trainers(self) -> tuple[ClientSplit, ...]:
        """The clients that train: all, or with `pooled` a single one that has the samples of all."""
        if not self.pooled:
            return self.clients
        train, val, test = (_union([getattr(c, s) for c in self.clients]) for s in ("train", "val", "test"))
        return (ClientSplit(id="pooled", domain="pooled", train=train, val=val, test=test),)

    def domain_tests(self) -> dict[str, Indices]:
        """Test samples of each domain that has clients."""
        domains = dict.fromkeys(client.domain for client in self.clients)
        return {name: _union([c.test for c in self.clients if c.domain == name]) for name in domains}

    @cached_property
    def digest(self) -> str:
        """sha256 of ids, domains and index arrays."""
        out = hashlib.sha256()
        parts = [(f"{c.id}|{c.domain}", [c.train, c.val, c.test]) for c in self.clients]
        parts += [(f"held_out|{name}", [indices]) for name, indices in self.held_out.items()]
        for name, arrays in parts:
            out.update(f"{name}|{'|'.join(str(len(array)) for array in arrays)}\n".encode())
            for array in arrays:
                out.update(array.astype("<i8").tobytes())
        return out.hexdigest()


def _union(arrays: Sequence[Indices]) -> Indices:
    return np.unique(np.concatenate(arrays)) if arrays else np.empty(0, dtype=np.int64)
