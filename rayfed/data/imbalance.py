"""Domains with very different numbers of clients, and clients with very different numbers of samples.

Cheng et al., FedGCR, AAAI 2024 [cheng2024fedgcr], section 4.1: the domain imbalance factor (DIF) is the
number of clients of the largest domain divided by that of the smallest. Numbers of clients and of samples
fall geometrically.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        count: Number of clients.
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
