"""A virtual population: any number of clients, whose samples are drawn when they are asked for.

Only the number of samples of a client is known before. Everything that is drawn follows from the seed, the
domain and the number of the client in it, so a client has the same samples in every process and round, and in
every population that is large enough to contain it.

Clients draw from one pool of samples for each split of a domain.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from rayfed.client_facts import ClientNames, ClientTable, Splits
from rayfed.data.data_config import DataConfig
from rayfed.data.partition.dealing import Indices, smallest_part, split_sizes, stratified_order
from rayfed.data.partition.partition import SPLITS, ClientSplit, Partition, union
from rayfed.errors import ConfigError
from rayfed.seeds import generator


@dataclass(frozen=True, eq=False)
class SamplePool:
    """Samples from which the clients of a domain draw, sorted by class.

    Attributes:
        rows: Indices into the data set, shape (n,).
        counts: Number of samples of each of the K classes of the domain, shape (K,).
    """

    rows: Indices
    counts: Indices

    @classmethod
    def of(cls, rows: Indices, labels: NDArray[np.int64], classes: NDArray[np.int64]) -> SamplePool:
        """The pool of these samples. Args: labels: of all samples. classes: of the domain, ascending."""
        own = labels[rows]
        counts = np.searchsorted(np.sort(own), classes, side="right")
        return cls(rows[np.argsort(own, kind="stable")], np.diff(counts, prepend=0))

    def draw(self, shares: NDArray[np.float64], size: int, rng: np.random.Generator) -> Indices:
        """Draw samples with replacement.

        Args:
            shares: Share of each class, shape (K,), which sum to 1. Classes without samples are left out.
            size: Number of samples.
            rng: Generator of the draws.

        Returns:
            Indices, ascending, shape (size,); none where the pool is empty.
        """
        if not size or not len(self.rows):
            return np.empty(0, dtype=np.int64)
        present = shares * (self.counts > 0)
        weights = present if present.sum() > 0 else self.counts.astype(np.float64)
        of_class = np.repeat(self.counts, numbers := rng.multinomial(size, weights / weights.sum()))
        first = np.repeat(np.cumsum(self.counts) - self.counts, numbers)
        return np.sort(self.rows[first + (rng.random(size) * of_class).astype(np.int64)])


@dataclass(frozen=True, eq=False)
class Domain:
    """A domain of a population: how many clients it has, and what they draw from.

    Attributes:
        name: Name of the domain.
        clients: Number of its clients.
        train, val: Pools of training and validation samples.
        test: Test samples, which its clients share.
    """

    name: str
    clients: int
    train: SamplePool
    val: SamplePool
    test: Indices

    def replaced(self, new: Callable[[Indices], Indices], labels: NDArray[np.int64]) -> Domain:
        """The domain with its samples replaced.

        Args:
            new: Gives the new samples for the former ones of a split.
            labels: Labels of all new samples.
        """
        train, val = new(self.train.rows), new(self.val.rows)
        classes = np.unique(labels[np.append(train, val)])
        drawn = [SamplePool.of(rows, labels, classes) for rows in (train, val)]
        return replace(self, train=drawn[0], val=drawn[1], test=new(self.test))


def domain_of(
    name: str,
    clients: int,
    halves: tuple[Indices, Indices],
    labels: NDArray[np.int64],
    config: DataConfig,
    seed: int,
) -> Domain:
    """A domain of a population, whose samples to train and to validate are separated, stratified by class.

    Args:
        clients: Number of its clients.
        halves: Its samples to train and validate, and its test samples.
        labels: Class of each sample of the data set.
        config: The config section `data`, whose `population` is set.

    Raises:
        ConfigError: Nothing is left to train on.
    """
    assert config.population is not None
    pool, test = halves
    share = config.val if isinstance(config.val, float) else min(config.val / config.population.size, 0.5)
    num_val = max(int(np.floor(share * len(pool) + 0.5)), int(share > 0))
    if num_val >= len(pool):
        raise ConfigError(
            f"data.population: domain {name!r} has {len(pool)} samples to draw from, of which data.val takes "
            f"{num_val}; lower data.val or data.test, or raise data.limit"
        )
    order = stratified_order(labels[pool], generator(seed, "population", name, "val"))
    classes = np.unique(labels[pool])
    val, train = (SamplePool.of(np.sort(rows), labels, classes) for rows in np.split(pool[order], [num_val]))
    return Domain(name=name, clients=clients, train=train, val=val, test=test)


MOST_TRIED = 1000
"""Largest number that is tried as the smallest one with which a client has something to train on."""

KEPT = 512
"""Clients whose samples a process remembers, which are drawn again where they are asked for later."""


class Population(Sequence[ClientSplit]):
    """The clients of a virtual population, in the order of the domains.

    The number of samples of a client is log-normal; its class shares are a Dirichlet vector whose mean is the
    class shares of the domain, with `alpha` times the number of classes as the sum of its parameters. Then
    training and validation samples are drawn with replacement, from separate samples of the domain, so that
    no client trains on a sample by which another one is validated.
    """

    def __init__(self, domains: Sequence[Domain], data: DataConfig, seed: int) -> None:
        """Draw the numbers of samples, not the samples.

        Args:
            domains: The domains that have clients.
            data: The config section `data`, whose `population` is set.
        """
        assert data.population is not None
        self.config = data.population
        self.domains = tuple(domains)
        self._seed = seed
        counts = [domain.clients for domain in domains]
        of = np.repeat(np.arange(len(domains), dtype=np.int32), counts)
        width = len(str(len(of) - 1))
        self.names = ClientNames(f"c{i:0{width}d}-{domains[d].name}" for i, d in enumerate(of.tolist()))
        sizes = np.concatenate([self._sizes(domain) for domain in domains])
        sizes = np.maximum(sizes, smallest_part(data, 1, MOST_TRIED))
        val = split_sizes(data, sizes)[1]
        train = sizes - val
        self.num_val = val * np.array([len(domain.val.rows) > 0 for domain in domains])[of]
        self._first = np.cumsum([0, *counts])
        self.table = ClientTable(self.names, [domain.name for domain in domains], of, train)
        self._remembered: dict[int, ClientSplit] = {}

    def _sizes(self, domain: Domain) -> Indices:
        """Numbers of samples of the clients of a domain; their logarithms are normal."""
        sigma = self.config.sigma
        mu = np.log(self.config.size) - sigma**2 / 2  # then the mean of the numbers is `size`
        normal = generator(self._seed, "population", domain.name).standard_normal(domain.clients)
        return np.maximum(np.rint(np.exp(mu + sigma * normal)), 1).astype(np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_remembered": {}}

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> ClientSplit: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ClientSplit, ...]: ...
    def __getitem__(self, index: int | slice) -> ClientSplit | tuple[ClientSplit, ...]:
        """Draw the samples of a client, or of several."""
        if isinstance(index, slice):
            return tuple(self[i] for i in range(len(self))[index])
        place = range(len(self))[index]
        if place not in self._remembered:
            if len(self._remembered) >= KEPT:
                self._remembered.clear()
            self._remembered[place] = self._draw(place)
        return self._remembered[place]

    def _draw(self, place: int) -> ClientSplit:
        number = int(self.table.domain[place])
        domain = self.domains[number]
        rng = generator(self._seed, "population", domain.name, place - int(self._first[number]))
        prior = domain.train.counts / domain.train.counts.sum()
        positive = np.flatnonzero(prior)
        shares = np.zeros(len(prior))
        shares[positive] = rng.dirichlet(self.config.alpha * len(positive) * prior[positive])
        return ClientSplit(
            id=self.names[place],
            domain=domain.name,
            train=domain.train.draw(shares, int(self.table.sizes[place]), rng),
            val=domain.val.draw(shares, int(self.num_val[place]), rng),
            test=domain.test,
        )

    def rows_of(self, client: str) -> Splits:
        """Row numbers by split. Raises KeyError for a name that is no client."""
        own = self[self.names.position(client)]
        return {split: getattr(own, split) for split in SPLITS}

    def used(self) -> Indices:
        """Row numbers that any client can have, in any order."""
        return np.concatenate([rows for d in self.domains for rows in (d.train.rows, d.val.rows, d.test)])

    def count(self, split: str) -> int:
        """Number of training or validation samples of all clients together."""
        return int((self.table.sizes if split == "train" else self.num_val).sum())

    def facts(self) -> Iterator[tuple[str, list[Indices]]]:
        """Facts on which the samples of all clients depend, by name."""
        yield f"{json.dumps(asdict(self.config))}|{self._seed}", [self.table.sizes, self.num_val]
        for domain in self.domains:
            pools = [array for pool in (domain.train, domain.val) for array in (pool.rows, pool.counts)]
            yield f"{domain.name}|{domain.clients}", [*pools, domain.test]


@dataclass(frozen=True, kw_only=True, eq=False)
class VirtualPartition(Partition):
    """A partition whose clients are a virtual population.

    What it says about all clients follows from the pools and from the numbers of samples; nothing is drawn.
    """

    clients: Population

    @property
    def drawn(self) -> Population:
        return self.clients

    @cached_property
    def listed(self) -> Sequence[ClientSplit]:
        return self.trainers if self.pooled else ()

    @cached_property
    def trainers(self) -> Sequence[ClientSplit]:
        """The clients that train: all, or with `pooled` a single one that has all samples of the pools."""
        if not self.pooled:
            return self.clients
        pools = self.clients.domains
        train, val = (np.sort(np.concatenate([getattr(d, s).rows for d in pools])) for s in ("train", "val"))
        return (
            ClientSplit(
                id="pooled", domain="pooled", train=train, val=val, test=union([d.test for d in pools])
            ),
        )

    @property
    def table(self) -> ClientTable:
        return self.clients.table

    @property
    def longest(self) -> int:
        trained = (self.training.sizes, *([self.clients.num_val] if not self.pooled else ()))
        return max(*(int(sizes.max()) for sizes in trained), *(len(d.test) for d in self.clients.domains))

    def count(self, split: str) -> int:
        return self.clients.count(split)

    def domain_tests(self) -> dict[str, Indices]:
        return {domain.name: domain.test for domain in self.clients.domains}

    def domain_training(self) -> dict[str, Indices]:
        return {domain.name: np.sort(domain.train.rows) for domain in self.clients.domains}

    def fixed_sets(self) -> dict[str, Splits]:
        pools = {d.name: {"test": d.test, "val": np.sort(d.val.rows)} for d in self.clients.domains}
        return {**pools, **{name: {"test": rows} for name, rows in self.held_out.items()}}

    def pieces(self) -> Iterator[tuple[str, str, Indices]]:
        """The samples of the pools, which belong to no client, and those of held-out domains."""
        for domain in self.clients.domains:
            yield "", "train", np.sort(domain.train.rows)
            yield "", "val", np.sort(domain.val.rows)
            yield "", "test", domain.test
        for own in self.held_out.values():
            yield "", "held_out", own

    def _facts(self) -> Iterator[tuple[str, list[Indices]]]:
        return self.clients.facts()
