"""Domains with very different numbers of clients, and clients with very different numbers of samples.

Gong et al., FedGCR, AAAI 2024: the domain imbalance factor (DIF) says how many clients the largest domain has
for one of the smallest. Counts, volumes and client sizes fall in geometric series.
"""

from __future__ import annotations

from collections.abc import Sequence

RATIOS = {(5, 5): 1.5, (5, 10): 1.8, (6, 5): 1.4, (6, 10): 1.6, (4, 5): 1.7, (4, 10): 2.16}
"""By number of domains and factor, as the authors rounded them: Digit-Five, DomainNet, PACS."""

BALANCED = 2
"""Clients of each domain at factor 1."""

BALANCED_STEP = 3.0
"""Ratio of the sizes of a domain's two clients at factor 1."""


def ratio_of(num_domains: int, factor: float) -> float:
    """Ratio of the client counts of neighbouring domains: the authors' where they chose one, else the root.

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
    """Clients of each domain, largest first.

    Args:
        num_domains: Domains with clients.
        factor: Clients of the largest domain for one of the smallest; 1 gives two clients each.
        total: Clients there shall be; none: as many as the ratios give. Other totals are shared out in
            proportion, rounded to the largest remainders, and everybody gets at least one.

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
    while sum(counts) > total:  # the small domains were given a client that was not theirs
        counts[counts.index(max(counts))] -= 1
    for i in sorted(range(num_domains), key=lambda i: counts[i] - exact[i])[: total - sum(counts)]:
        counts[i] += 1
    return counts


def pools(available: Sequence[int], ratio: float) -> list[int]:
    """Samples used of each domain: each 1 / ratio of the one before, no more than there are.

    At ratio 1 all domains give as many as the smallest has.
    """
    if ratio == 1:
        return [min(available)] * len(available)
    sizes = [available[0]]
    for limit in available[1:]:
        sizes.append(min(int(sizes[-1] / ratio), limit))
    return sizes


def client_sizes(part: int, count: int, step: float) -> list[int]:
    """Samples of each of a domain's clients, smallest first: a geometric series within `part` samples."""
    if count == 1 or step == 1:
        return [part // count] * count
    first = part / ((step**count - 1) / (step - 1))
    return [int(first * step**j) for j in range(count)]


def steps(counts: Sequence[int], ratio: float, within: str) -> list[float]:
    """Ratio of neighbouring client sizes in each domain.

    Args:
        counts: Clients of each domain, largest first.
        ratio: Of the client counts; 1 gives 1 : 3.
        within: `ratio` uses it within domains too (Digit-Five, DomainNet); `factor` makes the largest client
            as many times the smallest as the largest domain has clients for one of the smallest (PACS).
    """
    if ratio == 1:
        return [BALANCED_STEP] * len(counts)
    if within == "ratio":
        return [ratio] * len(counts)
    factor = counts[0] // counts[-1]
    return [factor ** (1 / (count - 1)) if count > 1 else 1.0 for count in counts]


def raised(sizes: Sequence[int], smallest: int) -> list[int]:
    """The sizes with none below `smallest`; what is missing comes from the largest."""
    found = list(sizes)
    for i in range(len(found)):
        while found[i] < smallest:
            largest = found.index(max(found))
            if found[largest] <= smallest:
                raise ValueError(f"{sum(sizes)} samples cannot give {len(sizes)} clients {smallest} each")
            found[i], found[largest] = found[i] + 1, found[largest] - 1
    return found
