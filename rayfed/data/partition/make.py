"""Make a partition from labels, domains, config and seed; equal arguments give an equal partition.

Schemes, by name, distribute the samples of one domain to its clients; for natural clients a column of the
data says whose samples they are.
"""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayfed.data.data_config import DataConfig, check_config, client_domains
from rayfed.data.partition.dealing import (
    Indices,
    client_counts,
    client_sizes,
    deal_by_dirichlet,
    deal_by_inner_dirichlet,
    deal_by_quantity,
    deal_classes,
    deal_evenly,
    deal_in_proportion,
    deal_shards,
    dealt_sizes,
    growing_shares,
    imbalanced_counts,
    no_tests,
    ratio_of,
    separates_test,
    shares_test,
    size_ratios,
    smallest_part,
    split_sizes,
    stratified_order,
    too_few,
    too_many,
    with_minimum,
)
from rayfed.data.partition.partition import SPLITS, ClientSplit, Partition
from rayfed.data.partition.population import Population, VirtualPartition, domain_of
from rayfed.data.partition_config import PartitionConfig
from rayfed.data.source import make_source
from rayfed.errors import ConfigError, DataError, count_of
from rayfed.seeds import generator
from rayfed.user_files import parse_json

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]*")
OTHER = re.compile(r"[^A-Za-z0-9_. -]+")
"""Characters that are not in the name of a client."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Imported:
    """The content of a partition file; every sample exists and belongs to one client only.

    Attributes:
        clients: Ascending indices of samples by client and split; a client whose samples have no split has
            the only split "all".
        shared_tests: Indices of test samples that belong to no client.
        held_out: Indices of the samples of held-out domains; None if the format of the file has none.
        ids: Whether the names of the clients are ids of a run, which are kept.
    """

    clients: dict[str, dict[str, Indices]]
    shared_tests: Indices = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    held_out: Indices | None = None
    ids: bool = False


def read_partition(file: str, labels: NDArray[np.int64], keys: Sequence[str]) -> Imported:
    """Read a partition for a data set.

    Args:
        file: Path of the file; its suffix determines the format.
        labels: Class of each sample, shape (N,).
        keys: Key of each sample.

    Raises:
        DataError: The file does not exist, is in another format, or does not fit the data; one line.
    """
    path = Path(file)
    kinds: dict[str, Callable[[Path], Iterable[tuple[str, str, Any]]]] = {".json": _json, ".csv": _csv}
    if path.suffix not in (*kinds, ".parquet"):
        raise DataError(f"data.partition.file: {file!r} is none of .parquet, .json, .csv")
    if not path.is_file():
        raise DataError(f"data.partition.file: there is no file {file!r}")
    where = f"data.partition.file: {path.name}"
    try:
        if path.suffix == ".parquet":
            return _manifest(path, where, labels, keys)
        triples = list(kinds[path.suffix](path))
    except OSError as err:
        raise DataError(f"{where} cannot be read ({err.strerror or err})") from err
    except (ValueError, KeyError, csv.Error) as err:  # Arrow's errors are ValueErrors or KeyErrors
        why = str(err).splitlines()[0] if str(err) else type(err).__name__
        raise DataError(f"{where} is not a partition ({why})") from err
    return Imported(clients=_collect(triples, where, keys))


def _manifest(path: Path, where: str, labels: NDArray[np.int64], keys: Sequence[str]) -> Imported:
    import pyarrow.parquet as pq

    table = pq.read_table(path, columns=["key", "label", "client", "split"])
    rows = list(zip(*(table[name].to_pylist() for name in ("client", "split", "key")), strict=True))
    own = _collect([row for row in rows if row[0]], where, keys)
    index_of = {key: index for index, key in enumerate(keys)}
    unowned = [(split, key) for client, split, key in rows if not client]
    if lost := sum(key not in index_of for _, key in unowned):
        raise DataError(f"{where}: {lost} test samples are not in this data set")
    if other := next((split for split, _ in unowned if split not in ("test", "held_out")), None):
        raise DataError(
            f"{where}: a sample of the split {other!r} has no client; only test and held_out need none"
        )
    tests = [index_of[key] for split, key in unowned if split == "test"]
    held_out = [index_of[key] for split, key in unowned if split == "held_out"]
    listed = np.array([index_of[key] for _, _, key in rows], dtype=np.int64)
    if wrong := int((labels[listed] != np.asarray(table["label"])).sum()):
        raise DataError(f"{where}: {wrong} samples have other labels in this data set; the classes differ")
    return Imported(
        clients=own,
        shared_tests=np.unique(np.array(tests, dtype=np.int64)),
        held_out=np.array(held_out, dtype=np.int64),
        ids=True,
    )


def _json(path: Path) -> Iterator[tuple[str, str, Any]]:
    content = parse_json(path.read_bytes())
    if not isinstance(content, Mapping):
        raise ValueError("expected an object of clients")  # noqa: TRY004  (all malformed files raise ValueError)
    for client, value in content.items():
        if value in ([], {}):
            raise ValueError(f"client {client!r} has no samples; leave it out, or give it some")
        for split, samples in (value if isinstance(value, Mapping) else {"all": value}).items():
            if not isinstance(samples, list):
                raise ValueError(f"client {client!r}: expected a list of samples")  # noqa: TRY004
            for sample in samples:
                yield client, split, sample


def _csv(path: Path) -> Iterator[tuple[str, str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines)
        missing = {"client", "sample"} - set(reader.fieldnames or ())
        if missing:
            raise ValueError(f"no column {', '.join(sorted(missing))}")
        rows = list(reader)
    has_splits = any(row.get("split") for row in rows)
    for number, row in enumerate(rows, start=2):
        sample = row["sample"] or ""
        if has_splits and not row["split"]:
            raise ValueError(
                f"line {number} has no value in split; there are samples with and without a split"
            )
        yield row["client"] or "", row.get("split") or "all", int(sample) if sample.isdecimal() else sample


def _collect(
    triples: Iterable[tuple[str, str, Any]], where: str, keys: Sequence[str]
) -> dict[str, dict[str, Indices]]:
    """Check (client, split, sample) triples and collect the indices of the samples by client and split."""
    index_of: dict[Any, int] = {key: index for index, key in enumerate(keys)}
    owner: dict[int, str] = {}
    parts: dict[str, dict[str, list[int]]] = {}
    written: dict[str, str] = {}
    for client, split, sample in triples:
        if not NAME.fullmatch(client):
            raise DataError(
                f"{where}: {client!r} is not a name for a client; use letters, digits, '_', '-', '.'"
            )
        if (other := written.setdefault(client.strip(), client)) != client:
            raise DataError(
                f"{where}: {client!r} and {other!r} differ in blanks only; write a client in one way"
            )
        if split not in (*SPLITS, "all"):
            raise DataError(f"{where}: client {client!r} has a split {split!r}; allowed: {', '.join(SPLITS)}")
        index = _index(sample, index_of)
        if index is None:
            raise DataError(
                f"{where}: client {client!r} has {sample!r}, which is neither a number below {len(keys)} nor "
                "a key of this data set"
            )
        if index in owner:
            raise DataError(f"{where}: sample {sample!r} is listed for {owner[index]!r} and for {client!r}")
        owner[index] = client
        parts.setdefault(client, {}).setdefault(split, []).append(index)
    _check_splits(parts, where)
    return {
        client: {split: np.array(sorted(own), dtype=np.int64) for split, own in splits.items()}
        for client, splits in parts.items()
    }


def _index(sample: Any, index_of: Mapping[Any, int]) -> int | None:
    """Index of a sample that is given by its index or its key; None if there is no such sample."""
    if isinstance(sample, str):
        return index_of.get(sample)
    if isinstance(sample, int) and not isinstance(sample, bool) and 0 <= sample < len(index_of):
        return sample
    return None


def _check_splits(parts: Mapping[str, Mapping[str, Sequence[int]]], where: str) -> None:
    if not parts:
        raise DataError(f"{where} lists no samples")
    for client, splits in parts.items():
        if "all" in splits and len(splits) > 1:
            raise DataError(f"{where}: client {client!r} has samples with and without a split")
        if not splits.keys() & {"train", "all"}:
            raise DataError(f"{where}: client {client!r} has nothing to train on")


Deal = Callable[[NDArray[np.int64], int, int, PartitionConfig, np.random.Generator], list[Indices]]
"""Labels, number of parts, smallest size of a part, config and generator; returns the positions of each part.

Raises ValueError where the samples do not give such parts.
"""

DEALS: Mapping[str, Deal] = {
    "by_domain": lambda labels, parts, smallest, config, rng: deal_evenly(len(labels), parts, rng),
    "dirichlet": lambda labels, parts, smallest, config, rng: deal_by_dirichlet(
        labels, parts, config.alpha, smallest, rng
    ),
    "pathological": lambda labels, parts, smallest, config, rng: deal_classes(
        labels, parts, config.classes_per_client, rng
    ),
    "shards": lambda labels, parts, smallest, config, rng: deal_shards(
        labels, parts, config.shards_per_client, rng
    ),
    "inner_dirichlet": lambda labels, parts, smallest, config, rng: deal_by_inner_dirichlet(
        labels, parts, config.alpha, rng
    ),
    "linear": lambda labels, parts, smallest, config, rng: deal_in_proportion(
        len(labels), growing_shares("linear", parts), smallest, rng
    ),
    "square": lambda labels, parts, smallest, config, rng: deal_in_proportion(
        len(labels), growing_shares("square", parts), smallest, rng
    ),
    "exponential": lambda labels, parts, smallest, config, rng: deal_in_proportion(
        len(labels), growing_shares("exponential", parts), smallest, rng
    ),
    "quantity": lambda labels, parts, smallest, config, rng: deal_by_quantity(
        len(labels), parts, config.alpha, smallest, rng
    ),
}
"""Functions that distribute the samples of a domain, by scheme; not those that look at all domains."""

FILLED = ("dirichlet", "quantity", "linear", "square", "exponential")
"""Schemes that give every client `min_samples` training samples; the others give it at least one."""


def deal(
    name: str, labels: NDArray[np.int64], count: int, config: DataConfig, rng: np.random.Generator
) -> list[Indices]:
    """Distribute the samples of a domain to its clients.

    Args:
        name: Name of the domain, for messages.
        labels: Class of each sample of the domain, shape (n,).
        rng: Generator of the draws.

    Returns:
        Positions of the samples of each client, int64.

    Raises:
        ConfigError: The samples are too few, or cannot be distributed as the scheme says.
    """
    partition = config.partition
    num_train = partition.min_samples if partition.scheme in FILLED else 1
    smallest = smallest_part(config, num_train, len(labels))
    if len(labels) < count * smallest:
        raise ConfigError(too_many(config, name, count, len(labels), smallest))
    try:
        parts = DEALS[partition.scheme](labels, count, smallest, partition, rng)
    except ValueError as err:
        raise ConfigError(_unfit(name, count, partition, str(err))) from err
    if (fewest := min(map(len, parts))) < smallest:
        why = f"a client would have {fewest} samples and needs {smallest}"
        raise ConfigError(_unfit(name, count, partition, why))
    return parts


EACH = {"pathological": "classes_per_client", "shards": "shards_per_client"}
"""Key of `data.partition` that says how much each client gets, of the schemes that have one."""


def _unfit(name: str, count: int, partition: PartitionConfig, why: str) -> str:
    keys = [f"data.partition.{key}" for key in (EACH.get(partition.scheme), "clients_per_domain") if key]
    return (
        f"data.partition.scheme: {partition.scheme} does not fit domain {name!r} with "
        f"{count_of(count, 'client')}: {why}; lower {' or '.join(keys)}, or use more samples of the domain "
        "(data.limit)"
    )


log = logging.getLogger(__name__)


def by_client(
    owners: Sequence[str],
    chosen: Indices,
    test: NDArray[np.bool_],
    config: DataConfig,
    splits: NDArray[np.uint8] | None = None,
) -> Imported:
    """The samples of every natural client, in the order of the names of the clients.

    Clients that would have fewer than `min_samples` training samples are left out, which is logged.

    Args:
        owners: Name of the client of each sample of the data set, N names; empty: the data set has none.
        chosen: Indices of the samples to use, ascending.
        test: Whether a sample is in the official test split, bool, shape (N,); with `data.test=official`
            these samples belong to no client.
        splits: Split that the data set gives each sample (`rayfed.data.listing.Listing`), which clients keep;
            None: it gives none.

    Raises:
        ConfigError: The data set does not name clients, or all of them are too small.
    """
    if not len(owners):
        columns = getattr(make_source(config), "header", ())
        named = f"set data.columns.client to one of {', '.join(columns)}, or " if columns else ""
        raise ConfigError(
            f"data.partition.scheme: natural needs a data set that names the client of each sample, and "
            f"{config.name} does not; {named}list the samples of each client in data.partition.file"
        )
    official = config.test == "official"
    tests = chosen[test[chosen]] if official else np.empty(0, dtype=np.int64)
    own = np.setdiff1d(chosen, tests)
    names, which, sizes = np.unique(
        np.asarray(owners, dtype=np.str_)[own], return_inverse=True, return_counts=True
    )
    wanted = config.partition.min_samples
    smallest = smallest_part(config, wanted, int(sizes.max(initial=0)))
    large = np.flatnonzero(sizes >= smallest)
    if not len(large):
        raise ConfigError(
            f"data.partition.min_samples: {wanted}, but no client of {config.name} has so many training "
            f"samples; the largest has {sizes.max(initial=0)} samples in all: "
            + ("lower it" if wanted > 1 else "give clients more, or set data.test and data.val")
        )
    if len(large) < len(names):
        small = np.setdiff1d(np.arange(len(names)), large).tolist()
        log.warning(_left_out({str(names[i]): int(sizes[i]) for i in small}, len(names), config))
    order = np.argsort(which, kind="stable")
    ends = np.cumsum(sizes)
    parts = {
        str(names[i]): _given_splits(own[order[ends[i] - sizes[i] : ends[i]]], splits) for i in large.tolist()
    }
    return Imported(clients=parts, shared_tests=tests)


MOST_NAMED = 5
"""Clients that are named in the warning about those that are left out."""


def _left_out(small: Mapping[str, int], count: int, config: DataConfig) -> str:
    """The warning about clients with too few training samples.

    Args:
        small: Number of all samples of each such client, by name.
        count: Number of all clients.
    """
    few = ", ".join(map(repr, list(small)[:MOST_NAMED])) + (", ..." if len(small) > MOST_NAMED else "")
    wanted = config.partition.min_samples
    if wanted > 1:
        return (
            f"data.partition.min_samples: {len(small)} of {count} clients have fewer than {wanted} training "
            f"samples and are left out ({few}); lower it to keep them"
        )
    if config.test and list(small.values()) == [1]:
        return f"client {few} is left out: its only example went to test; give it more, or set data.test"
    return (
        f"{count_of(len(small), 'client')} without a training example left after data.test and data.val "
        f"are left out ({few}); give them more, or lower these"
    )


def _given_splits(samples: Indices, splits: NDArray[np.uint8] | None) -> dict[str, Indices]:
    """The samples of a client by the split that the data set gives them; `all`: it gives none."""
    numbers = np.zeros(0, np.uint8) if splits is None else splits[samples]
    if not numbers.any():
        return {"all": samples}
    return {split: samples[numbers == number] for number, split in enumerate(SPLITS, start=1)}


__all__ = ["ClientSplit", "Partition", "imbalanced_counts", "make_partition"]

MIXED = "mixed"
"""The domain of a client whose samples are of several domains, which a partition file may list."""

_EMPTY: Indices = np.empty(0, dtype=np.int64)


def make_partition(
    labels: NDArray[np.int64],
    domain: NDArray[np.int64],
    test: NDArray[np.bool_],
    domains: Sequence[str],
    config: DataConfig,
    seed: int,
    keys: Sequence[str] = (),
    *,
    splits: NDArray[np.uint8] | None = None,
) -> Partition:
    """Distribute the samples of each domain to its clients, and split those of each client.

    Random streams are named by domain, so adding a domain does not change the clients of others. Unless
    `data.test` is `official`, the official test split of the data set is ignored and all samples are
    distributed.

    Args:
        labels: Class of each sample, shape (N,).
        domain: Domain of each sample, an index into `domains`, shape (N,).
        test: Whether a sample is in the official test split of the data set, bool, shape (N,).
        domains: Names of all domains of the data set.
        keys: Key of each sample, for `data.partition.file`; under scheme=natural, the client of each sample.
            Not needed otherwise.
        splits: Split that the data set gives each sample, under scheme=natural; None: it gives none.

    Raises:
        ConfigError: A domain does not exist, has no official test split but `data.test` asks for it, or has
            too few samples for its clients; or the partition file does not fit the data.
    """
    check_config(config)
    if (file := config.partition.file) is not None:
        config = replace(config, limit=None, partition=replace(config.partition, scheme="by_domain"))
        dealer = _Dealer(labels=labels, domain=domain, test=test, domains=domains, config=config, seed=seed)
        return dealer.from_file(read_partition(file, labels, keys))
    owners, held_out = client_domains(config, domains)
    counts = client_counts(config, owners)
    dealer = _Dealer(labels=labels, domain=domain, test=test, domains=domains, config=config, seed=seed)
    if config.population is not None:
        return dealer.population(owners, counts, held_out)
    if config.partition.scheme == "natural":
        chosen = np.sort(np.concatenate([dealer.samples(name) for name in owners]))
        return dealer.from_file(by_client(keys, chosen, test, config, splits))
    width = len(str(sum(counts) - 1))
    sizes = dealer.sizes(owners, counts)
    clients: list[ClientSplit] = []
    for name, count in zip(owners, counts, strict=True):
        for part in dealer.deal(name, count, sizes.get(name)):
            clients.append(ClientSplit(id=f"c{len(clients):0{width}d}-{name}", domain=name, **part))
    if (share := config.partition.share_of_smallest) is not None:
        clients = dealer.shorten(clients, share)
    return Partition(
        clients=tuple(clients),
        held_out={name: dealer.samples(name) for name in held_out},
        official_test=shares_test(config),
        pooled=config.partition.pooled,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Dealer:
    """Distributes the samples of one domain at a time; fields as the arguments of `make_partition`."""

    labels: NDArray[np.int64]
    domain: NDArray[np.int64]
    test: NDArray[np.bool_]
    domains: Sequence[str]
    config: DataConfig
    seed: int

    def samples(self, name: str) -> Indices:
        """Samples of a domain, ascending; `data.limit` takes some of them, stratified by class and split."""
        members = np.flatnonzero(self.domain == self.domains.index(name))
        limit = self.config.limit
        if isinstance(limit, float):
            limit = max(1, int(np.floor(limit * len(members) + 0.5)))
        if limit is None or len(members) <= limit:
            return members
        strata = 2 * self.labels[members] + self.test[members]
        order = stratified_order(strata, generator(self.seed, "partition", name, "limit"))
        return np.sort(members[order[:limit]])

    def sizes(self, owners: Sequence[str], counts: Sequence[int]) -> dict[str, list[int]]:
        """Number of samples of each client, by domain, under `imbalanced`; empty under other schemes."""
        partition = self.config.partition
        if partition.scheme != "imbalanced":
            return {}
        ratio = ratio_of(len(owners), partition.factor)
        available = [len(self.halves(name)[0]) for name in owners]
        used = dealt_sizes(available, ratio, partition.pool_size, partition.pool_share)
        sizes = {}
        for name, count, pool, step in zip(
            owners, counts, used, size_ratios(counts, ratio, partition.within), strict=True
        ):
            smallest = smallest_part(self.config, 1, pool)
            series = client_sizes(pool, count, step)  # rounded down, so its sum may be less than the pool
            if sum(series) < count * smallest:
                raise ConfigError(too_few(self.config, name, count, sum(series), smallest))
            sizes[name] = with_minimum(series, smallest)
        return sizes

    def halves(self, name: str) -> tuple[Indices, Indices | None]:
        """The samples to distribute to the clients of a domain, and its shared test samples or None."""
        samples = self.samples(name)
        config = self.config
        if config.test == "official":
            is_test = self.test[samples]
        elif separates_test(config):
            order = stratified_order(self.labels[samples], generator(self.seed, "partition", name, "test"))
            share = config.test
            count = share if isinstance(share, int) else int(np.floor(share * len(samples) + 0.5))
            is_test = np.zeros(len(samples), dtype=np.bool_)
            is_test[order[:count]] = True
        else:
            return samples, None
        return samples[~is_test], samples[is_test]

    def population(
        self, owners: Sequence[str], counts: Sequence[int], held_out: Sequence[str]
    ) -> VirtualPartition:
        """A virtual population, whose clients draw from the samples of their domain."""
        pools = []
        for name, count in zip(owners, counts, strict=True):
            pool, shared = self.halves(name)
            assert shared is not None  # the test samples of a population are those of its domains
            if self.config.test == "official" and not len(shared):
                raise ConfigError(no_tests(self.config, name))
            pools.append(domain_of(name, count, (pool, shared), self.labels, self.config, self.seed))
        return VirtualPartition(
            clients=Population(pools, self.config, self.seed),
            held_out={name: self.samples(name) for name in held_out},
            official_test=True,
            pooled=self.config.partition.pooled,
        )

    def deal(self, name: str, count: int, sizes: Sequence[int] | None = None) -> list[dict[str, Indices]]:
        """Training, validation and test samples of each client of a domain."""
        pool, shared = self.halves(name)
        if shared is not None and not len(shared):
            raise ConfigError(no_tests(self.config, name))
        parts = self.cut(name, pool, count, sizes)
        splits = [self.split(name, number, part) for number, part in enumerate(parts)]
        if shared is None:
            return splits
        tests = self.cut_test(name, shared, parts) if self.config.partition.split_test else [shared] * count
        return [split | {"test": own} for split, own in zip(splits, tests, strict=True)]

    def cut(self, name: str, pool: Indices, count: int, sizes: Sequence[int] | None) -> list[Indices]:
        """The samples of each client of a domain, enough for its training, validation and test samples."""
        rng = generator(self.seed, "partition", name)
        if sizes is not None:
            return [np.sort(part) for part in np.split(rng.permutation(pool), np.cumsum(sizes))[:-1]]
        return [np.sort(pool[part]) for part in deal(name, self.labels[pool], count, self.config, rng)]

    def split(self, name: str, number: int, part: Indices) -> dict[str, Indices]:
        """Split the samples of a client, stratified by class."""
        order = stratified_order(self.labels[part], generator(self.seed, "partition", name, "split", number))
        num_test, num_val = (int(number) for number in split_sizes(self.config, np.array(len(part))))
        test, val, train = np.split(part[order], [num_test, num_test + num_val])
        return {"train": np.sort(train), "val": np.sort(val), "test": np.sort(test)}

    def shorten(self, clients: Sequence[ClientSplit], share: float) -> list[ClientSplit]:
        """The clients with at most `share` of the smallest one's training samples, stratified by class."""
        most = max(1, int(share * min(len(client.train) for client in clients)))
        shorter = []
        for client in clients:
            rng = generator(self.seed, "partition", client.id, "share_of_smallest")
            order = stratified_order(self.labels[client.train], rng)
            shorter.append(replace(client, train=np.sort(client.train[order[:most]])))
        return shorter

    def cut_test(self, name: str, shared: Indices, parts: Sequence[Indices]) -> list[Indices]:
        """Distribute the test samples of a domain to its clients, in proportion to their parts."""
        ends = np.floor(np.cumsum([len(part) for part in parts]) / sum(map(len, parts)) * len(shared))
        mixed = generator(self.seed, "partition", name, "split_test").permutation(shared)
        pieces = np.split(mixed, ends[:-1].astype(np.int64))
        if not all(map(len, pieces)):
            raise ConfigError(
                f"data.partition.split_test: the {len(shared)} test samples of domain {name!r} do not give "
                f"each of its {len(parts)} clients one in proportion to their parts; set it to false"
            )
        return [np.sort(piece) for piece in pieces]

    def from_file(self, file: Imported) -> Partition:
        """The partition of a file; clients without splits are split as the config says."""
        held_out = self.held_out(file)
        tests = file.shared_tests
        if not file.ids and self.config.test == "official" and not len(tests):
            tests = np.flatnonzero(self.test)
        domain_of = {name: self.domain_of(name, splits, held_out) for name, splits in file.clients.items()}
        listed = [part for splits in file.clients.values() for part in splits.values()]
        unused = len(self.labels) - len(np.unique(np.concatenate([*listed, tests, *held_out.values()])))
        if unused and not file.ids:
            log.warning(
                "data.partition.file: not used: %s of %d that no client has",
                *(count_of(unused, "sample"), len(self.labels)),
            )
        order = {name: place for place, name in enumerate([*(self.config.domains or self.domains), MIXED])}
        # The sort is stable: clients of one domain stay in the order of the file.
        names = sorted(domain_of, key=lambda name: order.get(domain_of[name], len(order)))
        width = len(str(len(names) - 1))
        clients = []
        for number, name in enumerate(names):
            id = name if file.ids else f"c{number:0{width}d}-{OTHER.sub('-', name)}"
            splits = self.splits_from_file(name, file.clients[name], tests)
            clients.append(ClientSplit(id=id, domain=domain_of[name], **splits))
        return Partition(
            clients=tuple(clients),
            held_out=held_out,
            official_test=len(tests) > 0,
            pooled=self.config.partition.pooled,
        )

    def splits_from_file(self, client: str, listed: dict[str, Indices], tests: Indices) -> dict[str, Indices]:
        """Training, validation and test samples of a client of a file.

        A client without its own test samples gets the shared `tests` of its domains.
        """
        domains = np.unique(self.domain[np.concatenate(list(listed.values()))])
        if "all" in listed:
            listed = self.split(client, 0, np.setdiff1d(listed["all"], tests))
        shared = tests[np.isin(self.domain[tests], domains)]
        own = {split: listed.get(split, _EMPTY) for split in SPLITS}
        if not len(own["test"]) and len(shared):
            own["test"] = shared
        if not len(own["train"]):
            raise ConfigError(f"data.partition.file: nothing is left to train on for client {client!r}")
        return own

    def held_out(self, file: Imported) -> dict[str, Indices]:
        """Samples of each held-out domain: those of the file if it has any, else those of the config."""
        wanted = client_domains(self.config, self.domains)[1]
        if file.held_out is None:
            return {name: self.samples(name) for name in wanted}
        places = self.domain[file.held_out]
        saved = {self.domains[n]: np.sort(file.held_out[places == n]) for n in dict.fromkeys(places.tolist())}
        if wanted and set(wanted) != set(saved):
            raise ConfigError(
                f"data.held_out: {', '.join(wanted)}, but the partition file holds out "
                f"{', '.join(saved) or 'nothing'}; leave data.held_out out"
            )
        return {name: saved[name] for name in wanted or saved}

    def domain_of(self, client: str, splits: dict[str, Indices], held_out: dict[str, Indices]) -> str:
        """The domain of the samples of a client, or MIXED if there are several."""
        places = np.unique(self.domain[np.concatenate(list(splits.values()))])
        names = [self.domains[place] for place in places]
        if taken := [name for name in names if name in held_out]:
            raise ConfigError(
                f"data.held_out: {taken[0]!r}, but client {client!r} of the file has samples of it; hold out "
                "another domain, or remove them from the file"
            )
        return names[0] if len(names) == 1 else MIXED
