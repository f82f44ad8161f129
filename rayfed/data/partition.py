"""Who has which samples: a pure function of labels, domains, config and seed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rayfed.data import manifest
from rayfed.data.config import DataConfig, check, client_counts, client_domains
from rayfed.data.imbalance import client_sizes, imbalanced_counts, pools, raised, ratio_of, steps
from rayfed.data.skew import Indices, deal_by_dirichlet, deal_evenly, stratified_order
from rayfed.errors import ConfigError
from rayfed.seeds import generator

if TYPE_CHECKING:
    import pyarrow as pa

    from rayfed.data.shards import Dataset

__all__ = ["ClientSplit", "Partition", "imbalanced_counts", "make_partition"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientSplit:
    """The samples of one client: ascending indices into the data set, int64.

    Attributes:
        id: `c07-sketch`; the alphabetical order of ids is the order of the clients.
        domain: The client's domain.
        train: Samples to train on, at least one.
        val: Samples for validation, possibly none.
        test: Samples for testing; with an official test split, all of the domain's, shared by its clients.
    """

    id: str
    domain: str
    train: Indices
    val: Indices
    test: Indices


@dataclass(frozen=True, kw_only=True, eq=False)
class Partition:
    """All clients, in the order of their ids, and what nobody owns.

    Attributes:
        clients: Clients of one domain are consecutive, domains in the order of the config.
        held_out: All samples of each domain that has no client.
        official_test: Whether the clients of a domain share its official test split.
        pooled: Whether one trainer holds everybody's training and validation samples.
    """

    clients: tuple[ClientSplit, ...]
    held_out: dict[str, Indices]
    official_test: bool
    pooled: bool

    @cached_property
    def trainers(self) -> tuple[ClientSplit, ...]:
        """Who trains: the clients, or with `pooled` one that has all of their samples."""
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
        """sha256 over ids, domains and index arrays."""
        out = hashlib.sha256()
        parts = [(f"{c.id}|{c.domain}", [c.train, c.val, c.test]) for c in self.clients]
        parts += [(f"held_out|{name}", [indices]) for name, indices in self.held_out.items()]
        for name, arrays in parts:
            out.update(f"{name}|{'|'.join(str(len(array)) for array in arrays)}\n".encode())
            for array in arrays:
                out.update(array.astype("<i8").tobytes())
        return out.hexdigest()

    def table(self, labels: NDArray[np.int64], classes: Sequence[str]) -> list[dict[str, Any]]:
        """One row per client: client, domain; train, val, test counts; number of classes; the top class."""
        return manifest.client_rows(self, labels, classes)

    def to_table(self, dataset: Dataset) -> pa.Table:
        """One row per sample and role: key, index, label, domain, client, split."""
        return manifest.to_table(self, dataset)

    def save_manifest(self, path: Path, dataset: Dataset) -> None:
        """Write `to_table` as parquet, whole or not at all, with the digests of partition and data."""
        manifest.save(self, path, dataset)


def make_partition(
    labels: NDArray[np.int64],
    domain: NDArray[np.int64],
    test: NDArray[np.bool_],
    domains: Sequence[str],
    config: DataConfig,
    seed: int,
) -> Partition:
    """Deal the samples of each domain to its clients, and split every client's part.

    Every domain draws from streams of its own name, so adding a domain changes nobody else's part. Unless
    `data.test` is `official`, the data set's own test split is ignored and all samples are dealt.

    Args:
        labels: Class of each sample, shape (N,).
        domain: Domain of each sample, an index into `domains`, shape (N,).
        test: Whether a sample is in the data set's own test split, shape (N,).
        domains: All domain names of the data set.
        config: Which domains, how many clients, which shares.
        seed: Seed of the experiment.

    Raises:
        ConfigError: A domain does not exist, has no official test set though asked for, or is too small.
    """
    check(config)
    owners, held_out = client_domains(config, domains)
    counts = client_counts(config.partition, owners)
    dealer = _Dealer(labels=labels, domain=domain, test=test, domains=domains, config=config, seed=seed)
    width = len(str(sum(counts) - 1))
    clients: list[ClientSplit] = []
    sizes = dealer.sizes(owners, counts)
    for name, count in zip(owners, counts, strict=True):
        for part in dealer.deal(name, count, sizes.get(name)):
            clients.append(ClientSplit(id=f"c{len(clients):0{width}d}-{name}", domain=name, **part))
    return Partition(
        clients=tuple(clients),
        held_out={name: dealer.samples(name) for name in held_out},
        official_test=config.test == "official" or config.partition.scheme == "imbalanced",
        pooled=config.partition.pooled,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Dealer:
    """Deals one domain at a time; the fields are the arguments of `make_partition`."""

    labels: NDArray[np.int64]
    domain: NDArray[np.int64]
    test: NDArray[np.bool_]
    domains: Sequence[str]
    config: DataConfig
    seed: int

    def samples(self, name: str) -> Indices:
        """A domain's samples, ascending, after `data.limit`, which keeps the shares of classes and tests."""
        found = np.flatnonzero(self.domain == self.domains.index(name))
        limit = self.config.limit
        if isinstance(limit, float):
            limit = max(1, int(np.floor(limit * len(found) + 0.5)))
        if limit is None or len(found) <= limit:
            return found
        strata = 2 * self.labels[found] + self.test[found]
        order = stratified_order(strata, generator(self.seed, "partition", name, "limit"))
        return np.sort(found[order[:limit]])

    def sizes(self, owners: Sequence[str], counts: Sequence[int]) -> dict[str, list[int]]:
        """Under `imbalanced`: samples of each client, by domain; otherwise nothing."""
        partition = self.config.partition
        if partition.scheme != "imbalanced":
            return {}
        ratio = ratio_of(len(owners), partition.factor)
        used = pools([len(self.halves(name)[0]) for name in owners], ratio)
        found = {}
        for name, count, pool, step in zip(
            owners, counts, used, steps(counts, ratio, partition.within), strict=True
        ):
            smallest = _smallest_part(self.config, 1, pool)
            series = client_sizes(pool, count, step)  # rounded down: it may use fewer than the pool has
            if sum(series) < count * smallest:
                raise ConfigError(_too_few(self.config, name, count, sum(series), smallest))
            found[name] = raised(series, smallest)
        return found

    def halves(self, name: str) -> tuple[Indices, Indices | None]:
        """What is dealt to a domain's clients, and the test samples they share, if they do."""
        samples, config = self.samples(name), self.config
        if config.test == "official":
            is_test = self.test[samples]
        elif config.partition.scheme == "imbalanced":
            order = stratified_order(self.labels[samples], generator(self.seed, "partition", name, "test"))
            share = config.test
            count = share if isinstance(share, int) else int(np.floor(share * len(samples) + 0.5))
            is_test = np.zeros(len(samples), dtype=np.bool_)
            is_test[order[:count]] = True
        else:
            return samples, None
        return samples[~is_test], samples[is_test]

    def deal(self, name: str, count: int, sizes: Sequence[int] | None = None) -> list[dict[str, Indices]]:
        """Training, validation and test samples of each of a domain's clients."""
        pool, shared = self.halves(name)
        if shared is not None and not len(shared):
            raise ConfigError(
                f"data.test: official, but domain {name!r} has no test split of its own; "
                "set data.test to a fraction, e.g. 0.2"
            )
        parts = self.cut(name, pool, count, sizes)
        splits = [self.split(name, number, part) for number, part in enumerate(parts)]
        return splits if shared is None else [split | {"test": shared} for split in splits]

    def cut(self, name: str, pool: Indices, count: int, sizes: Sequence[int] | None) -> list[Indices]:
        """The parts of a domain's clients, each large enough for what is taken from it."""
        partition = self.config.partition
        if sizes is not None:
            order = generator(self.seed, "partition", name).permutation(pool)
            return [np.sort(part) for part in np.split(order, np.cumsum(sizes))[:-1]]
        by_dirichlet = partition.scheme == "dirichlet"
        smallest = _smallest_part(self.config, partition.min_samples if by_dirichlet else 1, len(pool))
        if len(pool) < count * smallest:
            raise ConfigError(_too_many(self.config, name, count, len(pool), smallest))
        rng = generator(self.seed, "partition", name)
        if by_dirichlet:
            parts = deal_by_dirichlet(self.labels[pool], count, partition.alpha, smallest, rng)
        else:
            parts = deal_evenly(len(pool), count, rng)
        return [np.sort(pool[part]) for part in parts]

    def split(self, name: str, number: int, part: Indices) -> dict[str, Indices]:
        """A client's part in three, each with the part's shares of classes where the numbers allow it."""
        order = stratified_order(self.labels[part], generator(self.seed, "partition", name, "split", number))
        num_test, num_val = (int(taken) for taken in _taken(self.config, np.array(len(part))))
        test, val, train = np.split(part[order], [num_test, num_test + num_val])
        return {"train": np.sort(train), "val": np.sort(val), "test": np.sort(test)}


def _taken(config: DataConfig, sizes: Indices) -> tuple[Indices, Indices]:
    """How many test and validation samples parts of these sizes give; for a fraction > 0, at least one."""

    def count(share: float | int) -> Indices:
        if isinstance(share, int):
            return np.full_like(sizes, share)
        return np.maximum(np.floor(share * sizes + 0.5), float(share > 0)).astype(np.int64)

    test = 0 if config.test == "official" or config.partition.scheme == "imbalanced" else config.test
    return count(test), count(config.val)


def _smallest_part(config: DataConfig, num_train: int, num_samples: int) -> int:
    """The size from which on a part keeps `num_train` samples to train on, > `num_samples` if none does."""
    sizes = np.arange(num_samples + 1)
    test, val = _taken(config, sizes)
    # The last size that is too small, not the first that is enough: two roundings can both step up at once.
    return int(np.flatnonzero(sizes - test - val < num_train)[-1]) + 1


def _too_many(config: DataConfig, name: str, count: int, num_samples: int, smallest: int) -> str:
    clients = "1 client does" if count == 1 else f"{count} clients do"
    if fits := num_samples // smallest:
        advice = f"set at most {fits} for this domain"
    else:
        advice = "lower data.val, data.test or data.partition.min_samples, or raise data.limit"
    return (
        f"data.partition.clients_per_domain: {clients} not fit in domain {name!r} with its {num_samples} "
        f"samples to deal; a client needs {smallest} (scheme={config.partition.scheme}, val={config.val}, "
        f"test={config.test}); {advice}"
    )


def _too_few(config: DataConfig, name: str, count: int, pool: int, smallest: int) -> str:
    return (
        f"data.partition.factor: {config.partition.factor} gives domain {name!r} {count} clients but only "
        f"{pool} samples, and a client needs {smallest}; lower the factor or data.val, or raise data.limit"
    )


def _union(arrays: Sequence[Indices]) -> Indices:
    return np.unique(np.concatenate(arrays)) if arrays else np.empty(0, dtype=np.int64)
