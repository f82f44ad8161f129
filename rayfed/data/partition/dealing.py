"""Distributes the samples of a domain to clients: how many clients, parts of which sizes, and which samples.

For domains with very different numbers of clients: Cheng et al., FedGCR, AAAI 2024 [cheng2024fedgcr], section
4.1. The domain imbalance factor (DIF) is the number of clients of the largest domain divided by that of the
smallest. Numbers of clients and of samples fall geometrically.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rayfed.data.data_config import DataConfig
from rayfed.data.partition_config import PartitionConfig
from rayfed.errors import ConfigError

RATIOS = {(5, 5): 1.5, (5, 10): 1.8, (6, 5): 1.4, (6, 10): 1.6, (4, 5): 1.7, (4, 10): 2.16}
"""Ratio by number of domains and factor, of the authors' code, not the paper: Digit-Five, DomainNet, PACS."""

BALANCED = 2
"""Number of clients of each domain at factor 1."""

BALANCED_STEP = 3.0
"""Ratio of the sizes of a domain's two clients at factor 1."""


def ratio_of(num_domains: int, factor: float) -> float:
    """Ratio of the numbers of clients of successive domains.

    It is the authors' value if RATIOS has one, else factor ** (1 / (num_domains - 1)).

    Raises:
        ValueError: The factor is below 1 or there is no domain.
    """
    if num_domains < 1 or not factor >= 1:
        raise ValueError(f"{num_domains} domains with factor {factor}: need a domain and a factor >= 1")
    if num_domains == 1:
        return 1.0
    return RATIOS.get(
        (num_domains, int(factor) if factor == int(factor) else -1), factor ** (1 / (num_domains - 1))
    )


def imbalanced_counts(num_domains: int, factor: float, total: int | None = None) -> list[int]:
    """Number of clients of each domain, largest first.

    Args:
        num_domains: Number of domains that have clients.
        factor: Clients of the largest domain for each of the smallest; 1 gives two clients to each domain.
        total: Number of clients of all domains together, distributed in proportion with largest remainders,
            at least one to each domain; None: as many as the ratio gives.

    Raises:
        ValueError: The factor is below 1, or there are fewer clients than domains.
    """
    ratio = ratio_of(num_domains, factor)
    shares = [ratio ** (num_domains - 1 - i) for i in range(num_domains)]
    natural = [BALANCED] * num_domains if factor == 1 else [max(round(share), 1) for share in shares]
    if total is None or total == sum(natural):
        return natural
    if total < num_domains:
        raise ValueError(f"{total} clients cannot cover {num_domains} domains")
    exact = [total * share / sum(shares) for share in shares]
    counts = [max(int(value), 1) for value in exact]
    while sum(counts) > total:  # rounding small domains up to one client used too many
        counts[counts.index(max(counts))] -= 1
    for i in sorted(range(num_domains), key=lambda i: counts[i] - exact[i])[: total - sum(counts)]:
        counts[i] += 1
    return counts


def pool_sizes(available: Sequence[int], ratio: float) -> list[int]:
    """Number of samples to use of each domain: 1 / ratio of the domain before, but at most all it has.

    At ratio 1 every domain uses as many as the smallest has.

    Args:
        available: Number of samples of each domain, in the order of the domains.
        ratio: Ratio of successive domains.
    """
    if ratio == 1:
        return [min(available)] * len(available)
    sizes = [available[0]]
    for limit in available[1:]:
        sizes.append(min(int(sizes[-1] / ratio), limit))
    return sizes


def dealt_sizes(available: Sequence[int], ratio: float, pool: int | None, share: float) -> list[int]:
    """Number of samples that the clients of each domain get together, as FedGCR's authors count them.

    Args:
        available: Number of samples of each domain, in the order of the domains.
        ratio: Ratio of successive domains.
        pool: Number of samples of the first domain, of which that of the others is derived whatever they
            have; None: as `pool_sizes`.
        share: Share in (0, 1] of these numbers; rounded down, and at most all that a domain has.
    """
    if pool is None:
        pools = pool_sizes(available, ratio)
    else:
        pools = [pool]
        for _ in available[1:]:
            pools.append(int(pools[-1] / ratio))
    return [min(int(share * size), limit) for size, limit in zip(pools, available, strict=True)]


def client_sizes(part: int, count: int, step: float) -> list[int]:
    """Number of samples of each client of a domain, smallest first: a geometric series, rounded down.

    Args:
        part: Number of samples of the domain.
        step: Ratio of successive clients.
    """
    if count == 1 or step == 1:
        return [part // count] * count
    first = part / ((step**count - 1) / (step - 1))
    return [int(first * step**j) for j in range(count)]


def size_ratios(counts: Sequence[int], ratio: float, within: str) -> list[float]:
    """Ratio of the sizes of successive clients, for each domain.

    Args:
        counts: Number of clients of each domain, largest first.
        ratio: Ratio of the numbers of clients of successive domains; 1 gives sizes 1 : 3 in each domain.
        within: `ratio` uses the same ratio within domains (Digit-Five, DomainNet); `factor` makes the largest
            client of a domain larger than the smallest by the factor between the numbers of clients of the
            largest and the smallest domain (PACS).
    """
    if ratio == 1:
        return [BALANCED_STEP] * len(counts)
    if within == "ratio":
        return [ratio] * len(counts)
    factor = counts[0] // counts[-1]
    return [factor ** (1 / (count - 1)) if count > 1 else 1.0 for count in counts]


def with_minimum(sizes: Sequence[int], smallest: int) -> list[int]:
    """Move samples from the largest clients to those with fewer than `smallest`, until none has fewer.

    Args:
        sizes: Number of samples of each client.
        smallest: Number of samples that every client needs.

    Raises:
        ValueError: There are too few samples for all clients.
    """
    raised = list(sizes)
    for i in range(len(raised)):
        while raised[i] < smallest:
            largest = raised.index(max(raised))
            if raised[largest] <= smallest:
                raise ValueError(f"{sum(sizes)} samples cannot give {len(sizes)} clients {smallest} each")
            raised[i] += 1
            raised[largest] -= 1
    return raised


Indices = NDArray[np.int64]

MAX_TRIES = 100
"""Number of Dirichlet draws after which small clients get samples of large ones instead of another draw."""


def stratified_order(strata: NDArray[np.int64], rng: np.random.Generator) -> Indices:
    """A random order in which every prefix has each stratum in its overall proportion, to within about one.

    Args:
        strata: Stratum of each sample, e.g. its class, shape (n,).
        rng: Generator of the order.

    Returns:
        A permutation of 0..n-1, shape (n,). Samples are sorted by (i + u) / n_s, where i is the position of a
        sample among the n_s of its stratum, and u in [0, 1) is drawn for each stratum.
    """
    mixed = rng.permutation(len(strata))
    place = np.empty(len(strata))
    for stratum in np.unique(strata):
        members = mixed[strata[mixed] == stratum]
        place[members] = (np.arange(len(members)) + rng.random()) / len(members)
    return mixed[np.argsort(place[mixed], kind="stable")]


def deal_evenly(num_samples: int, num_parts: int, rng: np.random.Generator) -> list[Indices]:
    """Distribute positions 0..num_samples-1 at random to parts whose sizes differ by at most one."""
    return [part.astype(np.int64) for part in np.array_split(rng.permutation(num_samples), num_parts)]


def deal_by_dirichlet(
    labels: NDArray[np.int64], num_parts: int, alpha: float, smallest: int, rng: np.random.Generator
) -> list[Indices]:
    """Distribute positions class by class in Dirichlet proportions; no part has fewer than `smallest`.

    The feature-and-label-skew setting of Su et al., FedRA, ECCV 2024, as in the authors' code: a part that
    already has n / num_parts samples gets none of the next class, and a draw that leaves a part too small is
    repeated. The code draws for all parts, sets the entries of full parts to zero and rescales the rest,
    which gives a Dirichlet vector of the rest; here only these are drawn.

    Differs from the authors' code: after MAX_TRIES draws the best one is repaired by moving random samples
    from the largest parts to the smallest; theirs repeats without limit.

    Args:
        labels: Class of each sample, shape (n,), n >= num_parts * smallest.
        alpha: Concentration, > 0.
        smallest: Smallest number of samples of a part.
        rng: Generator of the draws.

    Returns:
        Positions of each part, int64.

    Raises:
        ValueError: There are too few samples.
    """
    if len(labels) < num_parts * smallest:
        raise ValueError(f"{len(labels)} samples cannot give {num_parts} parts at least {smallest} each")
    best: list[Indices] = []
    for _ in range(MAX_TRIES):
        parts = _draw_parts(labels, num_parts, alpha, rng)
        if not best or min(map(len, parts)) > min(map(len, best)):
            best = parts
        if min(map(len, best)) >= smallest:
            break
    return _fill_up(best, smallest, rng)


def deal_classes(
    labels: NDArray[np.int64], num_parts: int, num_classes: int, rng: np.random.Generator
) -> list[Indices]:
    """Distribute positions so that each part has samples of `num_classes` classes.

    One part after the other gets the classes that the fewest parts have so far, at random among equals, so
    that any two classes are in the same number of parts or differ by one. The samples of a class are
    distributed at random and evenly to its parts. Samples of a class that no part has are left out, which
    happens with num_parts * num_classes < number of classes only.

    Args:
        labels: Class of each sample, shape (n,).
        num_classes: Classes of a part.
        rng: Generator of the draws.

    Returns:
        Positions of each part, int64.

    Raises:
        ValueError: There are fewer classes than `num_classes`, or a class has fewer samples than parts.
    """
    present = np.unique(labels)
    if num_classes > len(present):
        raise ValueError(f"its samples have {len(present)} classes, fewer than {num_classes}")
    holders: list[list[int]] = [[] for _ in present]
    for part in range(num_parts):
        mixed = rng.permutation(len(present))
        held = np.array([len(holders[place]) for place in mixed])
        for place in mixed[np.argsort(held, kind="stable")[:num_classes]]:
            holders[place].append(part)
    pieces: list[list[Indices]] = [[] for _ in range(num_parts)]
    for label, parts in zip(present, holders, strict=True):
        members = rng.permutation(np.flatnonzero(labels == label))
        if len(members) < len(parts):
            raise ValueError(f"a class has {len(members)} samples for {len(parts)} clients")
        for part, piece in zip(parts, np.array_split(members, max(len(parts), 1)), strict=False):
            pieces[part].append(piece)
    return [np.concatenate(piece) for piece in pieces]


def deal_shards(
    labels: NDArray[np.int64], num_parts: int, num_shards: int, rng: np.random.Generator
) -> list[Indices]:
    """Sort positions by class, cut them into shards of nearly equal size, and give each part some at random.

    The non-IID partition of McMahan et al., Communication-Efficient Learning of Deep Networks from
    Decentralized Data, AISTATS 2017, section 3, with 100 clients and 2 shards each.

    Args:
        labels: Class of each sample, shape (n,).
        num_shards: Shards of a part.
        rng: Generator of the order within a class, and of who gets which shard.

    Returns:
        Positions of each part, int64.

    Raises:
        ValueError: There are fewer samples than shards.
    """
    total = num_parts * num_shards
    if len(labels) < total:
        raise ValueError(f"{len(labels)} samples do not fill {total} shards")
    mixed = rng.permutation(len(labels))
    shards = np.array_split(mixed[np.argsort(labels[mixed], kind="stable")], total)
    order = rng.permutation(total).reshape(num_parts, num_shards)
    return [np.concatenate([shards[shard] for shard in own]) for own in order]


def deal_by_quantity(
    num_samples: int, num_parts: int, alpha: float, smallest: int, rng: np.random.Generator
) -> list[Indices]:
    """Distribute positions at random to parts whose sizes are in Dirichlet proportions.

    The quantity skew of Li et al., Federated Learning on Non-IID Data Silos, ICDE 2022. Parts that would have
    fewer than `smallest` samples get some of the largest ones, one by one.

    Args:
        num_samples: Number of samples, at least num_parts * smallest.
        alpha: Concentration, > 0.
        smallest: Smallest number of samples of a part.
        rng: Generator of the draws.

    Returns:
        Positions of each part, int64.

    Raises:
        ValueError: There are too few samples.
    """
    return deal_in_proportion(num_samples, rng.dirichlet(np.full(num_parts, alpha)), smallest, rng)


def deal_in_proportion(
    num_samples: int, shares: NDArray[np.float64], smallest: int, rng: np.random.Generator
) -> list[Indices]:
    """Distribute positions at random to parts with these shares of the samples.

    Parts that would have fewer than `smallest` samples get some of the largest ones, one by one.

    Args:
        num_samples: Number of samples, at least that of the parts times `smallest`.
        shares: One for each part, which sum to 1.
        smallest: Smallest number of samples of a part.
        rng: Generator of the draws.

    Returns:
        Positions of each part, int64.

    Raises:
        ValueError: There are too few samples.
    """
    ends = np.floor(np.cumsum(shares)[:-1] * num_samples).astype(np.int64)
    sizes = with_minimum(np.diff(ends, prepend=0, append=num_samples).tolist(), smallest)
    return np.split(rng.permutation(num_samples).astype(np.int64), np.cumsum(sizes)[:-1])


def growing_shares(growth: Literal["linear", "square", "exponential"], num_parts: int) -> NDArray[np.float64]:
    """Shares of parts k = 1, ..., num_parts in proportion to k, to k squared, or to e^k.

    >>> growing_shares("square", 2).tolist()
    [0.2, 0.8]
    """
    k = np.arange(1.0, num_parts + 1)
    weights = {"linear": k, "square": k**2, "exponential": np.exp(k - num_parts)}[growth]
    return np.asarray(weights / weights.sum())


def deal_by_inner_dirichlet(
    labels: NDArray[np.int64], num_parts: int, alpha: float, rng: np.random.Generator
) -> list[Indices]:
    """Distribute positions to parts of nearly equal size, each with other class shares.

    As Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, partition their images:
    each part draws class shares from a Dirichlet distribution, then parts in random order draw one sample
    after the other of a class by these shares. A class without samples left is drawn no more.

    Args:
        labels: Class of each sample, shape (n,).
        alpha: Concentration, > 0.
        rng: Generator of the draws.

    Returns:
        Positions of each part, int64.
    """
    present, members = np.unique(labels, return_inverse=True)
    left = [list(rng.permutation(np.flatnonzero(members == place))) for place in range(len(present))]
    shares = rng.dirichlet(np.full(len(present), alpha), size=num_parts)  # (parts, classes)
    sizes = [len(part) for part in np.array_split(np.arange(len(labels)), num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for part in rng.permutation(np.repeat(np.arange(num_parts), sizes)):
        there = np.array([bool(rest) for rest in left])
        weights = np.where(there, shares[part], 0.0)
        if not weights.sum():  # all classes of its shares are used up
            weights = there.astype(float)
        place = int(rng.choice(len(present), p=weights / weights.sum()))
        parts[part].append(int(left[place].pop()))
    return [np.array(part, dtype=np.int64) for part in parts]


def _draw_parts(
    labels: NDArray[np.int64], num_parts: int, alpha: float, rng: np.random.Generator
) -> list[Indices]:
    pieces: list[list[Indices]] = [[] for _ in range(num_parts)]
    sizes = np.zeros(num_parts, dtype=np.int64)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        room = np.flatnonzero(sizes * num_parts < len(labels))
        shares = rng.dirichlet(np.full(len(room), alpha))
        cuts = np.floor(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        for part, piece in zip(room, np.split(members, cuts), strict=True):
            pieces[part].append(piece)
            sizes[part] += len(piece)
    return [np.concatenate(piece) if piece else np.empty(0, dtype=np.int64) for piece in pieces]


def _fill_up(parts: list[Indices], smallest: int, rng: np.random.Generator) -> list[Indices]:
    """Move random samples from the largest part to the smallest until none has fewer than `smallest`.

    This ends, because each step either fills a part or reduces the largest to `smallest`, and while a part
    has fewer than `smallest`, another has more, as n >= num_parts * smallest.
    """
    parts = list(parts)
    while True:
        sizes = [len(part) for part in parts]
        least = int(np.argmin(sizes))
        most = int(np.argmax(sizes))
        if sizes[least] >= smallest:
            return parts
        moved = min(smallest - sizes[least], sizes[most] - smallest)
        mixed = rng.permutation(parts[most])
        parts[most] = mixed[moved:]
        parts[least] = np.concatenate([parts[least], mixed[:moved]])


def client_counts(config: DataConfig, owners: Sequence[str]) -> list[int]:
    """Number of clients of each domain.

    Args:
        owners: The domains that have clients, in the order of the clients.

    Raises:
        ConfigError: `clients_per_domain` is a list with another number of entries, or a population has fewer
            clients than there are domains.
    """
    partition = config.partition
    if config.population is not None:
        return _population_counts(config.population.clients, partition, owners)
    if partition.scheme == "imbalanced":
        return imbalanced_counts(len(owners), partition.factor)
    counts = partition.clients_per_domain
    if isinstance(counts, int):
        return [counts] * len(owners)
    if len(counts) != len(owners):
        raise ConfigError(
            f"data.partition.clients_per_domain: {len(counts)} numbers {counts} for {len(owners)} domains "
            f"({', '.join(owners)}); give one number each, or one for all"
        )
    return list(counts)


def _population_counts(total: int, partition: PartitionConfig, owners: Sequence[str]) -> list[int]:
    """Number of clients of each domain of a population: about the same, unless they are to be imbalanced."""
    if total < len(owners):
        raise ConfigError(
            f"data.population: {total} clients cannot cover {len(owners)} domains ({', '.join(owners)}); "
            f"give at least one for each, or choose data.domains"
        )
    if partition.scheme == "imbalanced":
        return imbalanced_counts(len(owners), partition.factor, total)
    each, rest = divmod(total, len(owners))
    return [each + (i < rest) for i in range(len(owners))]


def shares_test(config: DataConfig) -> bool:
    """Whether the clients of a domain share its test samples."""
    return separates_test(config) and not config.partition.split_test


def separates_test(config: DataConfig) -> bool:
    """Whether the test samples of a domain are separated before the others are distributed."""
    by_domain = config.partition.scheme == "imbalanced" or config.population is not None
    return config.test == "official" or by_domain


def split_sizes(config: DataConfig, sizes: Indices) -> tuple[Indices, Indices]:
    """Numbers of test and validation samples of clients of these sizes; a fraction > 0 gives at least one."""

    def count(share: float | int) -> Indices:
        if isinstance(share, int):
            return np.full_like(sizes, share)
        return np.maximum(np.floor(share * sizes + 0.5), float(share > 0)).astype(np.int64)

    test = config.test if isinstance(config.test, int | float) and not separates_test(config) else 0
    return count(test), count(config.val)


def smallest_part(config: DataConfig, num_train: int, num_samples: int) -> int:
    """The smallest size from which on a client keeps `num_train` training samples.

    It is larger than `num_samples` if no client of up to this size does.
    """
    sizes = np.arange(num_samples + 1)
    test, val = split_sizes(config, sizes)
    # One more than the last size that is too small. A smaller size may be enough, because two numbers are
    # rounded and both may increase at the same size.
    return int(np.flatnonzero(sizes - test - val < num_train)[-1]) + 1


def too_many(config: DataConfig, name: str, count: int, num_samples: int, smallest: int) -> str:
    """The message for a domain that has too many clients, with `smallest` the samples that a client needs."""
    clients = "1 client does" if count == 1 else f"{count} clients do"
    if fits := num_samples // smallest:
        advice = f"set at most {fits} for this domain"
        if config.partition.scheme == "dirichlet":
            advice += ", or lower data.partition.min_samples"
    else:
        advice = "lower data.val, data.test or data.partition.min_samples, or use more samples of the domain"
        advice += "" if config.limit is None else " (data.limit)"
    return (
        f"data.partition.clients_per_domain: {clients} not fit in domain {name!r} with its {num_samples} "
        f"samples to deal; a client needs {smallest} (scheme={config.partition.scheme}, val={config.val}, "
        f"test={config.test}); {advice}"
    )


def no_tests(config: DataConfig, name: str) -> str:
    """The message for a domain without test samples for its clients to share."""
    if config.test != "official":
        return (
            f"data.test: {config.test} leaves domain {name!r} without test samples; "
            "set data.test to a larger fraction, e.g. 0.2"
        )
    return (
        f"data.test: official, but domain {name!r} has no official test split; "
        "set data.test to a fraction, e.g. 0.2"
    )


def too_few(config: DataConfig, name: str, count: int, pool: int, smallest: int) -> str:
    """The message for a domain whose `factor` leaves `pool` samples for `count` clients."""
    return (
        f"data.partition.factor: {config.partition.factor} gives domain {name!r} {count} clients but only "
        f"{pool} samples, and a client needs {smallest}; lower the factor or data.val, or raise data.limit"
    )
