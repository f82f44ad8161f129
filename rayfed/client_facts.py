"""Facts about all clients of an experiment in a few arrays, which the processes of a machine share in memory.

A dictionary over all clients costs every process, and every message that holds it, about a kilobyte for each
client. Of these tables, Ray maps the arrays without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
Integers = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class ClientInfo:
    """Facts about a client that the server has before the client answers.

    Attributes:
        domain: Name of the client's domain. Methods that must not use it for training only report it.
        num_examples: Number of training examples.
    """

    domain: str
    num_examples: int


class ClientNames:
    """Distinct names in a fixed order, and the position of each."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names: npt.NDArray[np.bytes_] = np.array([name.encode() for name in names], dtype=np.bytes_)
        self._order = np.argsort(self._names, kind="stable")

    def position(self, name: str) -> int:
        """Position of a name.

        Raises:
            KeyError: It is not one of them.
        """
        wanted = np.bytes_(name.encode())
        place = int(np.searchsorted(self._names, wanted, sorter=self._order))
        if place == len(self._names) or self._names[self._order[place]] != wanted:
            raise KeyError(name)
        return int(self._order[place])

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        try:
            self.position(name)
        except KeyError:
            return False
        return True

    def __getitem__(self, position: int) -> str:
        name: bytes = self._names[position]
        return name.decode()

    def __iter__(self) -> Iterator[str]:
        return (name.decode() for name in self._names.tolist())

    def __len__(self) -> int:
        return len(self._names)


class ByClient(Mapping[str, T], Generic[T]):
    """One of a few values for each client, by id."""

    def __init__(self, names: ClientNames, values: Sequence[T], which: Integers) -> None:
        """Args: names: ids. values: the different values. which: index of each client's, shape (N,)."""
        self._names = names
        self._values = tuple(values)
        self._which = which

    @classmethod
    def same(cls, names: ClientNames, value: T) -> ByClient[T]:
        """The same value for all clients."""
        return cls(names, (value,), np.zeros(len(names), dtype=np.uint8))

    @property
    def different(self) -> tuple[T, ...]:
        """The values that clients may have."""
        return self._values

    def __getitem__(self, client: str) -> T:
        return self._values[self._which[self._names.position(client)]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class ClientTable(Mapping[str, ClientInfo]):
    """Domain and number of training examples of every client, by id, in a fixed order.

    Clients of a domain are consecutive.

    Attributes:
        names: Ids.
        domains: Names of the domains, in the order of their first clients.
        domain: Index into `domains` of each client, shape (N,).
        sizes: Number of training examples of each client, int64, shape (N,).
    """

    def __init__(
        self, names: ClientNames, domains: Sequence[str], domain: Integers, sizes: npt.NDArray[np.int64]
    ) -> None:
        """Args: as the attributes."""
        self.names = names
        self.domains = tuple(domains)
        self.domain = domain
        self.sizes = sizes

    @classmethod
    def of(cls, clients: Mapping[str, ClientInfo]) -> ClientTable:
        """The table of these clients, in their order, in which those of a domain are consecutive."""
        domains = list(dict.fromkeys(info.domain for info in clients.values()))
        index = {name: i for i, name in enumerate(domains)}
        domain = np.array([index[info.domain] for info in clients.values()], dtype=np.int32)
        sizes = np.array([info.num_examples for info in clients.values()], dtype=np.int64)
        return cls(ClientNames(clients), domains, domain, sizes)

    @property
    def domain_of(self) -> ByClient[str]:
        """Name of the domain of every client, by id."""
        return ByClient(self.names, self.domains, self.domain)

    def clients_by_domain(self) -> dict[str, int]:
        """Number of clients of each domain."""
        counts = np.bincount(self.domain, minlength=len(self.domains))
        return dict(zip(self.domains, counts.tolist(), strict=True))

    def places_by_domain(self) -> list[range]:
        """Positions of the clients of each domain."""
        ends = np.searchsorted(self.domain, np.arange(len(self.domains)), side="right").tolist()
        return [range(first, end) for first, end in zip([0, *ends], ends, strict=False)]

    def in_order(self, clients: Iterable[str]) -> list[str]:
        """These clients in the order of the table."""
        return sorted(clients, key=self.names.position)

    def __contains__(self, client: object) -> bool:
        return client in self.names

    def __getitem__(self, client: str) -> ClientInfo:
        place = self.names.position(client)
        return ClientInfo(domain=self.domains[self.domain[place]], num_examples=int(self.sizes[place]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


Indices: TypeAlias = npt.NDArray[np.int64]
Splits: TypeAlias = Mapping[str, Indices]
"""Indices of samples in the data set, ascending, by name of the split."""


class Drawn(Protocol):
    """Clients whose rows are drawn when they are asked for (`rayfed.data.partition.population`)."""

    names: ClientNames

    def rows_of(self, client: str) -> Splits:
        """Row numbers by split. Raises KeyError for a name that is no client."""

    def used(self) -> Indices:
        """Row numbers that any client can have, in any order."""


class RowTable(Mapping[str, Splits]):
    """The splits of clients and sets by id, as a mapping that is a handful of arrays.

    A dictionary of dictionaries of arrays costs a process about a kilobyte for each client; of this table,
    Ray maps the arrays without a copy.
    """

    def __init__(self, splits: Mapping[str, Splits], drawn: Drawn | None = None) -> None:
        """Pack the splits; later changes of the argument have no effect.

        Args:
            splits: Row numbers by id and split.
            drawn: Further clients, whose rows are not stored but drawn.
        """
        self._kinds = tuple(dict.fromkeys(kind for own in splits.values() for kind in own))
        self._names = ClientNames(splits)
        self._drawn = drawn
        none = np.empty(0, dtype=np.int64)
        parts = [own.get(kind, none) for own in splits.values() for kind in self._kinds]
        self._has = np.array([kind in own for own in splits.values() for kind in self._kinds], dtype=bool)
        self._ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        self._rows: Indices = np.concatenate([none, *parts]).astype(np.int64, copy=False)

    def __getitem__(self, name: str) -> Splits:
        try:
            first = self._names.position(name) * len(self._kinds)
        except KeyError:
            if self._drawn is None:
                raise
            return self._drawn.rows_of(name)
        return {
            kind: self._rows[self._ends[i] : self._ends[i + 1]]
            for i, kind in enumerate(self._kinds, start=first)
            if self._has[i]
        }

    def listed(self) -> ClientNames:
        """Ids whose rows are stored."""
        return self._names

    def used(self) -> Indices:
        """Row numbers of all examples of all splits, each once, ascending."""
        return np.unique(self._rows if self._drawn is None else np.append(self._rows, self._drawn.used()))

    def __iter__(self) -> Iterator[str]:
        return chain(self._names, () if self._drawn is None else self._drawn.names)

    def __len__(self) -> int:
        return len(self._names) + (0 if self._drawn is None else len(self._drawn.names))
